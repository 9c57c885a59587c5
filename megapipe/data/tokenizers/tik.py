"""Read TikTokenizer's file as Megatron-LM's tiktoken_tokenizer.py does.

The file is a JSON list of byte strings, ordered by rank.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from megapipe.errors import DataError

# The regular expression that cuts a text in words before merging, by --tiktoken-pattern.
_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# The first special tokens; the others are <SPECIAL_7>, <SPECIAL_8>, and so on.
_NAMED = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")


class TikTokenizer:
    """A tokenizer of the library tiktoken.

    The first num_special ids are special tokens. The byte strings of the file follow in the order
    of their ranks.

    `encode` returns the ids of a text, `decode` the text of ids.

    Args:
        path: the JSON file.
        pattern: "v1" or "v2", the value of --tiktoken-pattern.
        vocab_size: number of ids, special ones included.
        num_special: number of special tokens.

    Attributes:
        pattern: the regular expression that cuts a text in words.
        ids: {byte string: id}; byte strings with lower ids are merged first.
        specials: {special token: id}.
        vocab_size: number of ids.
        eod: end-of-document id, the id of </s>.

    Raises: DataError without the library tiktoken, or for a file that is missing or of another
        kind.
    """

    def __init__(self, path: str | None, pattern: str, vocab_size: int, num_special: int) -> None:
        if path is None:
            raise DataError(
                "--tokenizer-model is missing: --tokenizer-type TikTokenizer reads a JSON list of "
                "tokens"
            )
        try:
            import tiktoken
        except ImportError:
            raise DataError(
                "--tokenizer-type TikTokenizer needs the library tiktoken: pip install tiktoken"
            ) from None
        if not len(_NAMED) <= num_special < vocab_size:
            raise DataError(
                f"--tiktoken-num-special-tokens {num_special} must be at least {len(_NAMED)} and "
                f"below the {vocab_size} ids of --vocab-size"
            )
        ranks = _ranks(path, vocab_size - num_special)
        names = [*_NAMED, *(f"<SPECIAL_{i}>" for i in range(len(_NAMED), num_special))]
        self.pattern = _PATTERNS[pattern]
        self.ids = {token: rank + num_special for rank, token in enumerate(ranks)}
        self.specials = {name: i for i, name in enumerate(names)}
        self.vocab_size = vocab_size
        self.eod = _NAMED.index("</s>")
        self._library = tiktoken.Encoding(
            name="megapipe",
            pat_str=self.pattern,
            mergeable_ranks=self.ids,
            special_tokens=self.specials,
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; names of special tokens in it become their ids."""
        return self._library.encode(text, allowed_special="all")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids."""
        return self._library.decode([int(i) for i in ids])


def _ranks(path: str, count: int) -> list[bytes]:
    """Return the first `count` byte strings of a file, in the order of their ranks.

    Raises: DataError if there are fewer, if one of the 256 bytes is missing, or for duplicates.
    """
    try:
        with open(path, encoding="utf-8") as file:
            entries: Any = json.load(file)
        # A file may have more tokens than the run has ids: the rarest ones come last.
        ranks = [base64.b64decode(entry["token_bytes"]) for entry in entries[:count]]
    except OSError as error:
        raise DataError(f"--tokenizer-model {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DataError(
            f"--tokenizer-model {path} is not a JSON list of "
            '{"rank": 0, "token_bytes": BASE64, "token_str": ...}'
        ) from None
    if len(ranks) < count:
        raise DataError(
            f"--tokenizer-model {path} has {len(ranks)} tokens, {count} are needed: --vocab-size "
            "less --tiktoken-num-special-tokens"
        )
    flag = f"--tokenizer-model {path}: of its first {count} tokens"
    # The library panics on a text with such a byte, which would end the process.
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"{flag} none is the byte {missing[0]:#04x}, so no text with it has ids "
            f"({len(missing)} lack)"
        )
    # The last rank of each byte string: an earlier one is a duplicate.
    places = {token: i for i, token in enumerate(ranks)}
    twice = next((i for i, token in enumerate(ranks) if places[token] != i), None)
    if twice is not None:
        raise DataError(f"{flag} ranks {twice} and {places[ranks[twice]]} are the same")
    return ranks
