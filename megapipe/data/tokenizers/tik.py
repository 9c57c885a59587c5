"""TikTokenizer: a JSON list of byte strings by rank, as Megatron-LM's reads it (tiktoken_tokenizer.py)."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from megapipe.errors import DataError

_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""The patterns that cut text before pairs are merged, by --tiktoken-pattern."""
_NAMED = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")


class TikTokenizer:
    """The first num_special ids are special ones, the byte strings follow by rank; eod is </s>.

    Attributes:
        pattern: how text is cut.
        ids, specials: of byte strings, those of lower ids are merged first, and of names.
    Raises: DataError without the library tiktoken, or for a file that is missing or not of this kind.
    """

    def __init__(self, path: str | None, pattern: str, vocab_size: int, num_special: int) -> None:
        if path is None:
            raise DataError("--tokenizer-model is missing: --tokenizer-type TikTokenizer reads a JSON list of tokens")
        try:
            import tiktoken
        except ImportError:
            raise DataError("--tokenizer-type TikTokenizer needs the library tiktoken: pip install tiktoken") from None
        if not len(_NAMED) <= num_special < vocab_size:
            raise DataError(
                f"--tiktoken-num-special-tokens {num_special} must be at least {len(_NAMED)} and below the "
                f"{vocab_size} ids of --vocab-size"
            )
        ranks = _ranks(path, vocab_size - num_special)
        names = [*_NAMED, *(f"<SPECIAL_{i}>" for i in range(len(_NAMED), num_special))]
        self.pattern = _PATTERNS[pattern]
        self.ids = {token: rank + num_special for rank, token in enumerate(ranks)}
        self.specials = {name: i for i, name in enumerate(names)}
        self.vocab_size, self.eod = vocab_size, _NAMED.index("</s>")
        self._library = tiktoken.Encoding(
            name="megapipe", pat_str=self.pattern, mergeable_ranks=self.ids, special_tokens=self.specials
        )

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text, allowed_special="all")

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode([int(i) for i in ids])


def _ranks(path: str, count: int) -> list[bytes]:
    try:
        with open(path, encoding="utf-8") as file:
            entries: Any = json.load(file)
        ranks = [base64.b64decode(entry["token_bytes"]) for entry in entries[:count]]
    except OSError as error:
        raise DataError(f"--tokenizer-model {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DataError(
            f'--tokenizer-model {path} is not a JSON list of {{"rank": 0, "token_bytes": BASE64, "token_str": ...}}'
        ) from None
    if len(ranks) < count:
        raise DataError(
            f"--tokenizer-model {path} has {len(ranks)} tokens, {count} are needed: --vocab-size less "
            "--tiktoken-num-special-tokens"
        )
    flag = f"--tokenizer-model {path}: of its first {count} tokens"
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:  # the library would panic
        raise DataError(f"{flag} none is the byte {missing[0]:#04x}, so no text with it has ids ({len(missing)} lack)")
    places = {token: i for i, token in enumerate(ranks)}
    if twice := next((i for i, token in enumerate(ranks) if places[token] != i), None):
        raise DataError(f"{flag} those of rank {twice} and {places[ranks[twice]]} are the same")
    return ranks
