"""Tokenizers of the library `tokenizers`: GPT-2's pair of files, and a Hugging Face folder or tokenizer.json.

Ids are those of transformers' classes, which Megatron-LM calls, without importing them; a folder that has no
tokenizer.json is converted by transformers where that is installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megapipe.config.typed import shown
from megapipe.errors import DataError

_GPT2_EOD = "<|endoftext|>"
_LAST = 2**31 - 1
"""The largest id of a .bin file."""
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


class BPETokenizer:
    """A tokenizer of the library.

    Attributes:
        vocab_size: number of ids, added ones and those of no token included.
        eod: id that ends every document.

    Raises: DataError for an id that no token file can hold.
    """

    def __init__(self, library: tokenizers.Tokenizer, eod: int, flag: str, *, specials: bool = True) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --workers are processes; no threads to fork
        self._library, self._specials, self.eod = library, specials, eod
        token, last = max(library.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        if last > _LAST:
            raise DataError(f"{flag}: token {shown(token)} has the id {last}; ids are at most {_LAST}")
        self.vocab_size: int = last + 1

    def library(self) -> tokenizers.Tokenizer:
        """A copy that encodes as this does when asked for special tokens."""
        content = json.loads(self._library.to_str())
        return tokenizers.Tokenizer.from_str(json.dumps(content | ({} if self._specials else {"post_processor": None})))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode_batch_fast([text], add_special_tokens=self._specials)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode([int(i) for i in ids], skip_special_tokens=False)


def gpt2_tokenizer(vocab_file: str | None, merge_file: str | None) -> BPETokenizer:
    """GPT-2's byte-level BPE from vocab.json and merges.txt.

    Raises: DataError for a file that is missing, not of that kind, or without <|endoftext|>.
    """
    if vocab_file is None or merge_file is None:
        missing = [n for n, f in (("--vocab-file", vocab_file), ("--merge-file", merge_file)) if f is None]
        verb = "is" if len(missing) == 1 else "are"
        raise DataError(
            f"{' and '.join(missing)} {verb} missing: --tokenizer-type GPT2BPETokenizer reads vocab.json and merges.txt"
        )
    _read("--merge-file", merge_file)
    vocab = _json("--vocab-file", vocab_file)
    try:
        library = tokenizers.Tokenizer(models.BPE.from_file(vocab_file, merge_file))
    except Exception as error:  # the library raises nothing more particular
        raise DataError(f"--vocab-file {vocab_file} --merge-file {merge_file}: {error}") from None
    if _GPT2_EOD not in vocab:
        raise DataError(f"--vocab-file {vocab_file} has no {_GPT2_EOD}, which ends a document")
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([_GPT2_EOD])
    return BPETokenizer(library, vocab[_GPT2_EOD], f"--vocab-file {vocab_file}")


def hugging_face_tokenizer(path: str | None, *, specials: bool = True) -> BPETokenizer:
    """A tokenizer.json, or the folder that has one; eod is the folder's eos_token.

    Args:
        specials: whether a text gets what the tokenizer puts around it, such as a beginning-of-sequence id.
    Raises: DataError.
    """
    flag = f"--tokenizer-model {path}"
    if path is None:
        raise DataError("--tokenizer-model is missing: --tokenizer-type HuggingFaceTokenizer reads a folder")
    if not os.path.exists(path):
        raise DataError(
            f"{flag}: no such file or folder. Nothing is downloaded during a run; get one first: "
            f"hf download {path} --include '*token*' --local-dir DIR"
        )
    folder = Path(path) if os.path.isdir(path) else Path(path).parent
    file = folder / "tokenizer.json" if os.path.isdir(path) else Path(path)
    if file.is_file():
        try:
            library = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise DataError(f"{flag}: {file} is not a tokenizer.json: {error}") from None
    else:
        library = _converted(folder, flag)
    return BPETokenizer(library, _end_of_text(folder, library, flag), flag, specials=specials)


def _end_of_text(folder: Path, library: tokenizers.Tokenizer, flag: str) -> int:
    for name in _SETTINGS:
        if (folder / name).is_file():
            token: Any = _json("--tokenizer-model", str(folder / name)).get("eos_token")
            text = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                i = None
                if isinstance(text, str) and text.encode(errors="ignore").decode() == text:  # no half of a pair
                    i = library.token_to_id(text)
                if i is None:
                    raise DataError(f"{flag}: eos_token {shown(token)} of {folder / name} is none of its tokens")
                return i
    for text in (_GPT2_EOD, "</s>"):
        if (i := library.token_to_id(text)) is not None:
            return i
    raise DataError(f"{flag}: no eos_token in {' or '.join(_SETTINGS)} of {folder}. It ends a document; add one.")


def _converted(folder: Path, flag: str) -> tokenizers.Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise DataError(
            f"{flag} has no tokenizer.json; transformers would make one of its files, and is not installed. "
            "pip install transformers"
        ) from None
    try:
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        library = found._tokenizer
    except Exception as error:
        raise DataError(f"{flag} holds no tokenizer that transformers can read: {error}") from None
    assert isinstance(library, tokenizers.Tokenizer)
    return library


def _json(flag: str, path: str) -> dict[str, Any]:
    try:
        found = json.loads(_read(flag, path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{flag} {path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{flag} {path} is not an object of JSON")
    return found


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{flag} {path}: {error.strerror}") from None
