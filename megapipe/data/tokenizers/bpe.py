"""Build tokenizers of the library `tokenizers`: GPT-2's two files, or a Hugging Face folder.

Megatron-LM calls classes of transformers; the ids here are equal, without importing transformers.
Only a folder without a tokenizer.json needs transformers, which converts it.
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
# The largest id that a .bin file can hold.
_LAST = 2**31 - 1
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


class BPETokenizer:
    """A tokenizer of the library `tokenizers`.

    `encode` returns the ids of a text, `decode` the text of ids, and `library` a copy of the
    library's tokenizer.

    Args:
        library: the library's tokenizer.
        eod: end-of-document id.
        flag: the flag and its value, for messages.
        specials: `encode` adds the ids that the tokenizer puts around a text, such as a
            beginning-of-sequence id.

    Attributes:
        vocab_size: the largest id plus 1, so that added tokens and unused ids count.
        eod: end-of-document id.

    Raises: DataError for an id that no .bin file can hold.
    """

    def __init__(
        self, library: tokenizers.Tokenizer, eod: int, flag: str, *, specials: bool = True
    ) -> None:
        # --workers are processes. The library warns if a process with its threads is forked.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._library = library
        self._specials = specials
        self.eod = eod
        ids = library.get_vocab(with_added_tokens=True)
        token, last = max(ids.items(), key=lambda item: item[1])
        if last > _LAST:
            raise DataError(
                f"{flag}: token {shown(token)} has the id {last}; ids are at most {_LAST}"
            )
        self.vocab_size: int = last + 1

    def library(self) -> tokenizers.Tokenizer:
        """Return a copy of the library's tokenizer that gives the same ids as `encode`."""
        content = json.loads(self._library.to_str())
        if not self._specials:
            content["post_processor"] = None
        return tokenizers.Tokenizer.from_str(json.dumps(content))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        (encoded,) = self._library.encode_batch_fast([text], add_special_tokens=self._specials)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens included."""
        return self._library.decode([int(i) for i in ids], skip_special_tokens=False)


def gpt2_tokenizer(vocab_file: str | None, merge_file: str | None) -> BPETokenizer:
    """Return GPT-2's byte-level BPE from vocab.json and merges.txt.

    Args:
        vocab_file: the path of vocab.json; None is refused.
        merge_file: the path of merges.txt; None is refused.
    Raises: DataError for a file that is missing, of another kind, or without <|endoftext|>.
    """
    if vocab_file is None or merge_file is None:
        flags = (("--vocab-file", vocab_file), ("--merge-file", merge_file))
        missing = [flag for flag, file in flags if file is None]
        verb = "is" if len(missing) == 1 else "are"
        raise DataError(
            f"{' and '.join(missing)} {verb} missing: --tokenizer-type GPT2BPETokenizer reads "
            "vocab.json and merges.txt"
        )
    # Read for its error alone: the library does not say which of two files is missing.
    _read("--merge-file", merge_file)
    vocab = _json("--vocab-file", vocab_file)
    try:
        library = tokenizers.Tokenizer(models.BPE.from_file(vocab_file, merge_file))
    # The library raises no narrower type.
    except Exception as error:
        raise DataError(f"--vocab-file {vocab_file} --merge-file {merge_file}: {error}") from None
    if _GPT2_EOD not in vocab:
        raise DataError(f"--vocab-file {vocab_file} has no {_GPT2_EOD}, which ends a document")
    # What transformers' GPT2Tokenizer sets; the two files do not say it.
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([_GPT2_EOD])
    return BPETokenizer(library, vocab[_GPT2_EOD], f"--vocab-file {vocab_file}")


def hugging_face_tokenizer(path: str | None, *, specials: bool) -> BPETokenizer:
    """Return the tokenizer of a tokenizer.json, or of a folder.

    The end-of-document token is the folder's eos_token, else <|endoftext|>, else </s>.

    Args:
        path: the file or folder; None is refused.
        specials: add what the tokenizer puts around a text, such as a beginning-of-sequence id.
    Raises: DataError for a path that is missing or has no tokenizer, or without any of these
        tokens.
    """
    flag = f"--tokenizer-model {path}"
    if path is None:
        raise DataError(
            "--tokenizer-model is missing: --tokenizer-type HuggingFaceTokenizer reads a folder"
        )
    if not os.path.exists(path):
        raise DataError(
            f"{flag}: no such file or folder. Nothing is downloaded during a run; get one first: "
            f"hf download {path} --include '*token*' --local-dir DIR"
        )
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    folder = file.parent
    if file.is_file():
        try:
            library = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise DataError(f"{flag}: {file} is not a tokenizer.json: {error}") from None
    else:
        library = _converted(folder, flag)
    return BPETokenizer(library, _end_of_text(folder, library, flag), flag, specials=specials)


def _end_of_text(folder: Path, library: tokenizers.Tokenizer, flag: str) -> int:
    """Return the id of the eos_token in the settings of a folder.

    Without such a setting, <|endoftext|> is looked up, and then </s>.

    Args:
        folder: the Hugging Face folder.
        library: the tokenizer of the library `tokenizers`.
        flag: the flag and its value, for messages.
    Raises: DataError if the eos_token is no token of the tokenizer, or if there is none of the
        three.
    """
    for name in _SETTINGS:
        if not (folder / name).is_file():
            continue
        token: Any = _json("--tokenizer-model", str(folder / name)).get("eos_token")
        if token is None:
            continue
        text = token.get("content") if isinstance(token, dict) else token
        i = None
        # JSON can spell a lone surrogate, which the library cannot take.
        if isinstance(text, str) and text.encode(errors="ignore").decode() == text:
            i = library.token_to_id(text)
        if i is None:
            raise DataError(
                f"{flag}: eos_token {shown(token)} of {folder / name} is none of its tokens"
            )
        return i
    for text in (_GPT2_EOD, "</s>"):
        i = library.token_to_id(text)
        if i is not None:
            return i
    raise DataError(
        f"{flag}: no eos_token in {' or '.join(_SETTINGS)} of {folder}. It ends a document; add "
        "one."
    )


def _converted(folder: Path, flag: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of a folder without a tokenizer.json, converted by transformers.

    Args:
        flag: the flag and its value, for messages.
    Raises: DataError without transformers, or if transformers cannot convert it.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise DataError(
            f"{flag} has no tokenizer.json; transformers would make one of its files, and is not "
            "installed. pip install transformers"
        ) from None
    path = str(folder)
    try:
        # Code in the folder must never run, and nothing is downloaded.
        found = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        library = found._tokenizer
    except Exception as error:
        raise DataError(f"{flag} holds no tokenizer that transformers can read: {error}") from None
    assert isinstance(library, tokenizers.Tokenizer)
    return library


def _json(flag: str, path: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        flag: the flag and its value, for the error.
        path: the file.
    Raises: DataError if the file cannot be read or holds anything else.
    """
    try:
        found = json.loads(_read(flag, path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{flag} {path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{flag} {path} is not an object of JSON")
    return found


def _read(flag: str, path: str) -> bytes:
    """Return the content of a file.

    Args:
        flag: the flag and its value, for the error.
        path: the file.
    Raises: DataError with the flag if it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{flag} {path}: {error.strerror}") from None
