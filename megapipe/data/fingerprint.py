"""The fingerprint of the tokenizer that wrote a .bin/.idx pair: a small file beside them, compared by each run.

The fingerprint is of what the tokenizer does, not of its files: a text of many kinds, in ids. GPT-2's two files and the
tokenizer.json made of them have the same one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from megapipe.data.files import write_complete, writing
from megapipe.data.tokenizers.tokenizer import NullTokenizer, Tokenizer

_PROBE = (
    "The quick brown fox, it's 3.14159 o'clock on 2026-11-21!  Two  spaces\tand a tab.\n\n"
    "def f(x: int) -> str:\n    return f\"{x!r}\" + '\\n'  # comment\n"
    "<div class=\"a\">{'json': [1, 2.5e-3, null]}</div> SELECT * FROM t WHERE a >= 10;\n"
    "\u00dcber stra\u00dfe na\u00efve caf\u00e9 \u041f\u0440\u0438\u0432\u0435\u0442 \u4f60\u597d\u4e16\u754c "
    "\u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4 \u0645\u0631\u062d\u0628\u0627 \U0001f600\U0001f680 "
    "\u2211\u222b\u221e\n"
)


def fingerprint(tokenizer: Tokenizer) -> str:
    """The fingerprint of the ids that it makes; a NullTokenizer's is of its size alone."""
    probe = "0 1" if isinstance(tokenizer, NullTokenizer) else _PROBE
    content = json.dumps([tokenizer.vocab_size, tokenizer.eod, tokenizer.encode(probe)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def write_fingerprint(prefix: str, tokenizer: Tokenizer, kind: str) -> None:
    """Write the fingerprint beside PREFIX.bin and .idx."""
    said = {
        "fingerprint": fingerprint(tokenizer),
        "tokenizer_type": kind,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }
    write_complete(_path(prefix), json.dumps(said, indent=1) + "\n")


def forget_fingerprint(prefix: str) -> None:
    """Remove the fingerprint of a former PREFIX.bin and .idx."""
    with writing(prefix):
        _path(prefix).unlink(missing_ok=True)


def foreign(prefix: str, tokenizer: Tokenizer) -> Iterator[str]:
    """The line about data of another tokenizer; none where the writer is not known, as for Megatron-LM's data."""
    # A NullTokenizer takes any ids as they are; that none is too large is checked elsewhere.
    if isinstance(tokenizer, NullTokenizer) or not _path(prefix).is_file():
        return
    try:
        said = json.loads(_path(prefix).read_text())
        same = said["fingerprint"] == fingerprint(tokenizer)
        about = f"{said['tokenizer_type']} of {said['vocab_size']} ids (eod {said['eod']})"
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        yield f"--data-path {prefix}: {_path(prefix)} cannot be read. Delete it to go without the check."
        return
    if not same:
        yield (
            f"--data-path {prefix} was tokenised by another tokenizer, a {about}; the flags' "
            f"has {tokenizer.vocab_size} ids (eod {tokenizer.eod}) or cuts text otherwise. Give that one; "
            f"or delete {_path(prefix)} if you know better."
        )


def _path(prefix: str) -> Path:
    return Path(f"{prefix}.tokenizer.json")
