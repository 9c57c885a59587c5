"""Tokenise text into Megatron's .bin/.idx files.

The input is JSON Lines (one document per line) or plain text (one document per file).

    megapipe preprocess --input corpus.jsonl --output-prefix data/corpus --workers 2 --append-eod \
        --tokenizer-model tokenizer.model

writes data/corpus_text_document.bin and .idx and prints the --data-path to train with.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from megapipe.commands.progress import Progress
from megapipe.config import TokenizerConfig
from megapipe.data.files import file_problems, is_current, note_how
from megapipe.data.preprocess import Encoding, preprocess
from megapipe.data.tokenizers.tokenizer import tokenizer_files
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse, to_flags
from megapipe.flags.stop import say

_NOT_HERE = {
    "--split-sentences": "one document becomes one sequence",
    "--keep-newlines": "it belongs to --split-sentences",
    "--lang": "it belongs to --split-sentences",
    "--partitions": "--workers uses all cores on one file, and --input takes several files",
    "--keep-sequential-samples": "documents always keep the order of the input",
    "--find-optimal-num-workers": "use as many --workers as there are cores",
    "--workers-to-check": "use as many --workers as there are cores",
    "--max-documents": "use as many --workers as there are cores",
}
"""Flags of Megatron that this command does not have, and what to do instead."""
MOST_WORKERS = 4096
"""More processes than a host has cores. The pool takes at most a C int."""
_SAME_FILES = ("output_prefix", "workers", "log_interval", "reuse")
"""Flags that do not change the written files."""


@dataclass(frozen=True)
class Flags:
    """Tokenise text into Megatron's .bin/.idx files. Flags have Megatron's names if it has them."""

    input: tuple[str, ...] = ()
    """Files: .jsonl, .json, .ndjson (also .gz) with a document per line; others are one document
    of UTF-8 text."""
    output_prefix: str | None = None
    """Output without suffix: PREFIX_KEY_document.bin and .idx, for --json-keys KEY."""
    json_keys: tuple[str, ...] = ("text",)
    """Fields of each JSON line to tokenise, each into its own pair of files."""
    append_eod: bool = False
    """End every document with the end-of-document token."""
    workers: int = 1
    """Number of processes that tokenise."""
    log_interval: int = 1000
    """Print progress after this many documents."""
    reuse: bool = False
    """Keep existing files that were made with the same flags and are newer than their input."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    @property
    def prefixes(self) -> list[str]:
        """Return the prefix of the files of each key, without .bin and .idx."""
        return [f"{self.output_prefix}_{key}_document" for key in self.json_keys]


def main(argv: Sequence[str]) -> None:
    """Tokenise the input, and print the --data-path to train with.

    Raises: ConfigError for wrong flags.
    """
    given = [word.partition("=")[0] for word in argv]
    not_here = [flag for flag in given if flag in _NOT_HERE]
    if not_here:
        raise ConfigError(
            [
                f"{name} is Megatron's; it is not implemented here: {_NOT_HERE[name]}"
                for name in not_here
            ]
        )
    flags = parse(Flags, argv)
    _validate(flags)
    outputs = [f"{prefix}{end}" for prefix in flags.prefixes for end in (".bin", ".idx")]
    # A record of these flags stands next to the files, so that --reuse can compare.
    how = {name: value for name, value in asdict(flags).items() if name not in _SAME_FILES}
    if flags.reuse and is_current(outputs, [*flags.input, *tokenizer_files(flags.tokenizer)], how):
        say(f"{', '.join(outputs)}: up to date")
    else:
        bar = Progress()
        encoding = Encoding(flags.tokenizer, flags.json_keys, flags.append_eod)
        report = _progress(flags, bar)
        prefix = str(flags.output_prefix)
        try:
            made = preprocess(flags.input, prefix, encoding, flags.workers, report)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("nothing was written") from None
        finally:
            # The bar must be gone before the next line is printed.
            bar(1.0)
        for written in made:
            size = f"{written.documents} documents, {written.tokens} tokens"
            say(f"Wrote {written.prefix}.bin and .idx: {size}")
        note_how(outputs[0], how)
    # The training must have the kind of tokenizer even where this command has guessed it.
    words = ["--data-path", flags.prefixes[0]]
    if not flags.tokenizer.tokenizer_type:
        words += ["--tokenizer-type", flags.tokenizer.tokenizer]
    words += to_flags(flags.tokenizer)
    say(f"Next: megapipe pretrain {shlex.join(words)}")


def _validate(flags: Flags) -> None:
    """Check the flags. Raises: ConfigError with all problems."""
    problems = []
    if not flags.input:
        problems.append("--input is missing: --input corpus.jsonl, or text files")
    if flags.output_prefix is None:
        problems.append(
            "--output-prefix is missing: --output-prefix data/corpus writes "
            "data/corpus_text_document.bin"
        )
    if not 1 <= flags.workers <= MOST_WORKERS:
        problems.append(f"--workers {flags.workers} must be at least 1 and at most {MOST_WORKERS}")
    if flags.log_interval < 1:
        problems.append(f"--log-interval {flags.log_interval} must be at least 1")
    # Without --output-prefix there are no files to check, and one problem is enough.
    prefixes = flags.prefixes if flags.output_prefix else ()
    for prefix in prefixes:
        problems += file_problems({"--output-prefix": f"{prefix}.bin"})
    if problems:
        raise ConfigError(problems)


def _progress(flags: Flags, bar: Progress) -> Callable[[int, int], None]:
    """Return a function that reports progress, given (documents so far, bytes so far).

    On a terminal the function moves `bar`. Elsewhere it prints a line every --log-interval
    documents.
    """
    begin = time.monotonic()
    reported = 0
    # The size of a compressed file says little of the text in it, so it is left out.
    plain = [path for path in flags.input if os.path.isfile(path) and not path.endswith(".gz")]
    total = sum(map(os.path.getsize, plain))

    def report(documents: int, num_bytes: int) -> None:
        nonlocal reported
        if bar.shown and total:
            # The last files are still to be written when all bytes are read.
            bar(min(num_bytes / total, 0.99), f"{documents} documents")
        elif documents // flags.log_interval > reported // flags.log_interval:
            reported = documents
            # The first report may come within the resolution of the clock.
            seconds = max(time.monotonic() - begin, 1e-9)
            rate = f"{documents / seconds:.0f} docs/s, {num_bytes / seconds / 1e6:.1f} MB/s"
            say(f"Processed {documents} documents ({rate}).")

    return report
