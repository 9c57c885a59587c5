"""Store a fingerprint of the tokenizer next to each .bin/.idx pair, and compare it at each start.

The fingerprint is a hash of the ids of a fixed test text, not of the tokenizer's files. GPT-2's
vocab.json with merges.txt, and a tokenizer.json made from them, have equal fingerprints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from megapipe.data.files import write_complete, writing
from megapipe.data.tokenizers.tokenizer import NullTokenizer, Tokenizer

# Many kinds of text, so that two tokenizers that differ at all are likely to differ here:
# quotes, dates, white space, code, markup, accents, four scripts, emoji and symbols.
_PROBE = (
    "The quick brown fox, it's 3.14159 o'clock on 2026-11-21!  Two  spaces\tand a tab.\n\n"
    "def f(x: int) -> str:\n    return f\"{x!r}\" + '\\n'  # comment\n"
    "<div class=\"a\">{'json': [1, 2.5e-3, null]}</div> SELECT * FROM t WHERE a >= 10;\n"
    "\u00dcber stra\u00dfe na\u00efve caf\u00e9 \u041f\u0440\u0438\u0432\u0435\u0442 "
    "\u4f60\u597d\u4e16\u754c "
    "\u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4 \u0645\u0631\u062d\u0628\u0627 "
    "\U0001f600\U0001f680 "
    "\u2211\u222b\u221e\n"
)


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return 16 hexadecimal digits that identify the ids a tokenizer produces.

    The fingerprint of a NullTokenizer depends on its size and end-of-document id alone.
    """
    # A NullTokenizer reads numbers only.
    probe = "0 1" if isinstance(tokenizer, NullTokenizer) else _PROBE
    content = json.dumps([tokenizer.vocab_size, tokenizer.eod, tokenizer.encode(probe)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def write_fingerprint(prefix: str, tokenizer: Tokenizer, kind: str) -> None:
    """Write PREFIX.tokenizer.json for the pair PREFIX.bin and PREFIX.idx.

    Args:
        prefix: PREFIX.
        tokenizer: the tokenizer that wrote the pair.
        kind: the value of --tokenizer-type, for the message of a later run.
    """
    facts = {
        "fingerprint": fingerprint(tokenizer),
        "tokenizer_type": kind,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }
    write_complete(_path(prefix), json.dumps(facts, indent=1) + "\n")


def forget_fingerprint(prefix: str) -> None:
    """Delete the fingerprint of a former PREFIX.bin and PREFIX.idx, if there is one.

    Args:
        prefix: PREFIX.
    Raises: DataError if the file cannot be deleted.
    """
    with writing(prefix):
        _path(prefix).unlink(missing_ok=True)


def foreign(prefix: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a problem if PREFIX.bin was written by a tokenizer that produces other ids.

    A fingerprint that cannot be read is a problem too. Nothing is yielded if PREFIX has no
    fingerprint file, as after preprocessing by Megatron-LM, or for a NullTokenizer.

    Args:
        prefix: PREFIX.
        tokenizer: the tokenizer of the run.
    """
    # A NullTokenizer accepts any ids; `refuse_foreign_tokens` checks that none is too large.
    if isinstance(tokenizer, NullTokenizer) or not _path(prefix).is_file():
        return
    try:
        facts = json.loads(_path(prefix).read_text())
        equal = facts["fingerprint"] == fingerprint(tokenizer)
        writer = f"{facts['tokenizer_type']} of {facts['vocab_size']} ids (eod {facts['eod']})"
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        yield (
            f"--data-path {prefix}: {_path(prefix)} cannot be read. "
            "Delete it to go without the check."
        )
        return
    if not equal:
        yield (
            f"--data-path {prefix} was tokenised by another tokenizer, a {writer}; the flags' "
            f"has {tokenizer.vocab_size} ids (eod {tokenizer.eod}) or cuts text otherwise. "
            f"Give that one; or delete {_path(prefix)} if you know better."
        )


def _path(prefix: str) -> Path:
    """Return the path of the fingerprint file, PREFIX.tokenizer.json."""
    return Path(f"{prefix}.tokenizer.json")
