"""Start runs whose ranks differ in something drawn: none may train, and each difference must be
named to every rank.

    python tools/proofs/drawn_starts.py --cases 1000

A start is what each rank does before any group exists: read its flags and files, plan, and compare
over a TCP store. Ranks are threads, each with a connection of its own. One start in ten has no
difference and must go on.
"""

from __future__ import annotations

import dataclasses
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from megapipe.checks.run import flag_problems
from megapipe.config import Config
from megapipe.data.indexed import IndexedWriter
from megapipe.distributed.meeting.agreement import agree
from megapipe.errors import ConfigError, UserError
from megapipe.flags.parse import flags_of, parse, run
from megapipe.models.provider import find_provider
from megapipe.plan import make_plan
from megapipe.schedule import build, to_json
from megapipe.schedule.recipe import _built
from megapipe.training.guards import ranks
from tools.proofs.shrink import Draws, Fuzzer

FLAGS = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 "
    "--padded-vocab-size 128 --data-args-path list.txt --tokenizer-type SentencePieceTokenizer "
    "--tokenizer-model t.model --split 1,0,0 --micro-batch-size 1 --global-batch-size 8 "
    "--train-iters 3 --lr 1e-3 "
    "--pipeline-costs costs.json"
)
LAYOUT = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)
RANKS = 8
Facts = dict[str, str]


@dataclass(frozen=True)
class Flags(Draws):
    """Draw starts whose ranks differ, and see that none trains."""

    cases: float = 1000
    """Number of starts, of 2 to 8 ranks."""


@dataclass(frozen=True)
class Start:
    """One start. names: the names by which an error must call the odd ranks' settings; empty if all
    ranks agree.
    """

    kind: str
    names: tuple[str, ...]
    ranks: tuple[Facts, ...]
    odd: tuple[int, ...]


def write(lengths: Sequence[int], token: int = 1) -> None:
    """The data, in the current folder."""
    with IndexedWriter("tokens", np.uint16) as writer:
        writer.add_documents(np.full(sum(lengths), token), np.array(lengths))


def files() -> None:
    """All that a rank reads, in the current folder."""
    write([5, 7])
    Path("list.txt").write_text("tokens")
    Path("t.model").write_text("one")
    Path("costs.json").write_text('{"f": 1}')
    Path("s.json").write_text(to_json(build("1f1b", 2, 4)).replace("1f1b", "mine"))
    source = (
        "from megapipe.models.provider import gpt_provider as base\n"
        "def provider(*a): return base(*a)\n"
    )
    Path("model.py").write_text(source)


def append(path: str) -> Callable[[], None]:
    """Make a file another one that means the same."""

    def change() -> None:
        with Path(path).open("a") as file:
            file.write(" \n")

    return change


def other_table() -> None:
    """Another schedule under the same name."""
    Path("s.json").write_text(to_json(build("gpipe", 2, 4)).replace("gpipe", "mine"))


FILES: dict[str, Callable[[], None]] = {
    "list.txt (SHA-256)": append("list.txt"),
    "tokens.idx (SHA-256)": lambda: write([7, 5]),
    "tokens.bin (bytes)": lambda: write([5, 8]),
    "tokens.bin (SHA-256 of 64 ranges)": lambda: write([5, 7], token=2),
    "t.model of the tokenizer (SHA-256)": append("t.model"),
    "costs.json of --pipeline-costs (SHA-256)": append("costs.json"),
    "the schedule (SHA-256 of its table)": other_table,
    "model.py (SHA-256)": append("model.py"),
}


@cache
def configuration(ranks: int, *flags: str) -> Config:
    """Return the configuration of a run of a number of ranks."""
    return dataclasses.replace(parse(Config, [*FLAGS.split(), *flags]), world_size=ranks)


def facts(config: Config) -> Facts:
    """Return the facts that a rank reports, read anew as another process would."""
    make_plan.cache_clear()
    _built.cache_clear()
    return ranks.facts(config, make_plan(config), [find_provider("model.py:provider")])


def layouts(ranks: int) -> Iterator[list[str]]:
    """Yield the flags of all layouts of a number of ranks; data parallelism takes the rest."""
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            for cp in (1, 2):
                if ranks % (tp * pp * cp) == 0:
                    yield [
                        word
                        for pair in zip(LAYOUT, map(str, (tp, pp, cp)), strict=True)
                        for word in pair
                    ]


def other(kind: Any, value: Any, draw: random.Random) -> Any:
    """Another value of a flag's type."""
    if get_origin(kind) is Literal:
        return draw.choice([choice for choice in get_args(kind) if choice != value])
    if kind is bool:
        return not value
    if kind is int:
        return draw.choice(((value or 0) + 1, 2 * (value or 1), 4))
    if kind is float:
        return draw.choice((2 * (value or 0.5), (value or 0.0) + 0.125))
    return f"{value or ''}{draw.choice('abc')}"


def other_flag(config: Config, draw: random.Random) -> tuple[str, Facts]:
    """A flag, and what a rank says whose configuration is sound by itself and has another value of
    it.
    """
    while True:
        flag = draw.choice(
            [flag for flag in flags_of(Config).values() if flag.section and flag.count != "many"]
        )
        section = getattr(config, flag.section)
        changed = other(flag.kind, getattr(section, flag.field), draw)
        drawn = dataclasses.replace(
            config, **{flag.section: dataclasses.replace(section, **{flag.field: changed})}
        )
        try:
            if changed != getattr(section, flag.field) and not flag_problems(drawn):
                return flag.name, facts(drawn)
        except UserError:
            continue  # that rank would end by itself


def draw_start(draw: random.Random) -> Start:
    """Draw a start in the current folder, which has the files."""
    size = draw.choice((2, 4, 8))
    odd = tuple(sorted(draw.sample(range(size), draw.randint(1, size - 1))))
    kind = draw.choice(
        ("flag", "flag", "flag", "layout", "file", "torch", "Python", "megapipe", "nothing")
    )
    layout = draw.choice(list(layouts(size)))
    if kind == "file" and (name := draw.choice(list(FILES))).startswith("the schedule"):
        layout = [
            LAYOUT[1],
            "2",
            "--pipeline-schedule",
            "s.json",
            "--global-batch-size",
            str(2 * size),
        ]
    config = configuration(size, *layout)
    names: tuple[str, ...] = ()
    usual = differing = facts(config)
    if kind == "flag":
        name, differing = other_flag(config, draw)
        names = (name,)
    elif kind == "layout":
        another = draw.choice([other for other in layouts(size) if other != layout])
        names = tuple(
            flag for flag, a, b in zip(LAYOUT, layout[1::2], another[1::2], strict=True) if a != b
        )
        differing = facts(configuration(size, *another))
    elif kind == "file":
        FILES[name]()
        names, differing = (name,), facts(config)
        files()
    elif kind == "megapipe":
        names = ("megapipe (SHA-256 of its source)",)
        copy = Path("copy", ranks.PACKAGE.name)
        shutil.copytree(ranks.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        append(str(draw.choice(sorted(copy.rglob("*.py")))))()
        with patch.object(ranks, "PACKAGE", copy):
            differing = facts(config)
    elif kind in ("torch", "Python"):
        version = f"{draw.randint(2, 3)}.{draw.randint(20, 99)}.{draw.randint(0, 9)}"
        where = "torch.__version__" if kind == "torch" else "platform.python_version"
        names = (kind,)
        with patch(where, version if kind == "torch" else lambda: version):
            differing = facts(config)
    return Start(kind, names, tuple(differing if r in odd else usual for r in range(size)), odd)


class Starts:
    """Draws starts, in a folder of its own, and lets their ranks meet.

    Attributes:
        kinds: number of starts of each kind.
        longest: the most seconds until all ranks had reported.
    """

    def __init__(self) -> None:
        self.kinds, self.longest = Counter[str](), 0.0
        self.server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port = self.server.port
        self.clients = [TCPStore("127.0.0.1", port, None, False) for _ in range(RANKS)]

    def draw(self, draw: random.Random) -> Start:
        """Draw a start."""
        with TemporaryDirectory() as folder, chdir(folder):
            files()
            return draw_start(draw)

    def run(self, start: Start) -> list[str]:
        """Let the ranks of a start meet. Returns the mistakes in what they report."""
        began, size = time.monotonic(), len(start.ranks)
        name = f"start {self.kinds.total()}"
        self.kinds[start.kind] += 1

        def rank(r: int) -> tuple[str, ...]:
            try:
                agree(PrefixStore(name, self.clients[r]), r, size, start.ranks[r])
            except ConfigError as error:
                return error.problems
            return ()

        with ThreadPoolExecutor(size) as pool:
            told = list(pool.map(rank, range(size)))
        self.longest = max(self.longest, time.monotonic() - began)
        return problems(start, told)


def problems(start: Start, told: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the mistakes in what the ranks of a start are told."""
    if len(set(told)) > 1:
        return [f"ranks are told different things: {told}"]
    if not start.names:
        return [f"nothing differs, and they stop: {told[0]}"] if told[0] else []
    # Where rank 0 is odd, those that are named are all the ranks unlike it.
    shown: Sequence[int] = start.odd
    if 0 in start.odd:
        shown = sorted({*range(len(start.ranks))} - {*start.odd})
    ranks = re.compile(f"on ranks? {', '.join(map(str, shown))}(;|$)")
    return [
        f"not named: {name}, ranks {start.odd}; told {told[0]}"
        for name in start.names
        if not any(
            line.startswith(f"{name} differs between ranks: ") and ranks.search(line)
            for line in told[0]
        )
    ]


def main(argv: Sequence[str]) -> None:
    """End with 1 if a start trains with a difference, or does not without one."""
    starts = Starts()
    fuzzer = Fuzzer("starts", starts.draw, starts.run)
    fuzzer.prove(parse(Flags, argv), lambda start: f"{start.kind}, ranks {start.odd}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(starts.kinds.items()))
    print(f"{fuzzer.count} starts: {kinds}\n0 wrong; the longest took {starts.longest:.2f} s")


if __name__ == "__main__":
    run(main)
