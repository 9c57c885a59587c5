"""Start runs whose ranks differ in something drawn: none may train, and each difference must be
named to every rank.

    python tools/proofs/drawn_starts.py --starts 1000

A start is what each rank does before any group exists: read its flags and files, plan, and compare
over a TCP store. Ranks are threads, each with a connection of its own. One start in ten has no
difference and must go on.
"""

from __future__ import annotations

import dataclasses
import random
import re
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
from megapipe.flags.parse import flags_of, parse, stop
from megapipe.models.provider import find_provider
from megapipe.plan import make_plan
from megapipe.schedule import build, to_json
from megapipe.schedule.recipe import _built
from megapipe.training.guards import ranks

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
class Options:
    """Number of starts to draw."""

    starts: int = 1000
    """Of drawn runs of 2 to 8 ranks."""
    seed: int = 1
    """Of what is drawn."""


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


def draw_start(draw: random.Random, copy: Path) -> Start:
    """In the current folder, which has the files. copy: of the package, to be edited."""
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
        path = draw.choice(sorted(copy.rglob("*.py")))
        with path.open("a") as file:
            file.write("#")
        names = ("megapipe (SHA-256 of its source)",)
        with patch.object(ranks, "PACKAGE", copy):
            differing = facts(config)
    elif kind in ("torch", "Python"):
        version = f"{draw.randint(2, 3)}.{draw.randint(20, 99)}.{draw.randint(0, 9)}"
        where = "torch.__version__" if kind == "torch" else "platform.python_version"
        names = (kind,)
        with patch(where, version if kind == "torch" else lambda: version):
            differing = facts(config)
    return Start(kind, names, tuple(differing if r in odd else usual for r in range(size)), odd)


def problem(start: Start, stores: Sequence[PrefixStore], pool: ThreadPoolExecutor) -> str:
    """Let the ranks of a start meet.

    Returns: the mistake in the problems that they report; empty without one.
    """

    def rank(r: int) -> tuple[str, ...]:
        try:
            agree(stores[r], r, len(start.ranks), start.ranks[r])
        except ConfigError as error:
            return error.problems
        return ()

    told = list(pool.map(rank, range(len(start.ranks))))
    if len(set(told)) > 1:
        return f"ranks are told different things: {told}"
    if not start.names:
        return f"nothing differs, and they stop: {told[0]}" if told[0] else ""
    # All unlike rank 0.
    shown = start.odd if 0 not in start.odd else sorted({*range(len(start.ranks))} - {*start.odd})
    ranks = f"on ranks? {', '.join(map(str, shown))}(;|$)"
    missing = [
        name
        for name in start.names
        if not any(
            line.startswith(f"{name} differs between ranks: ") and re.search(ranks, line)
            for line in told[0]
        )
    ]
    return f"not named: {', '.join(missing)}, ranks {start.odd}; told {told[0]}" if missing else ""


def starts(count: int, seed: int) -> tuple[Counter[str], list[str], float]:
    """Return the number of starts of each kind, the errors found, and the longest time in seconds
    until ranks reported.
    """
    draw, kinds, wrong, longest = random.Random(seed), Counter[str](), [], 0.0
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, None, False) for _ in range(RANKS)]
    with TemporaryDirectory() as folder, chdir(folder), ThreadPoolExecutor(RANKS) as pool:
        files()
        for path in ranks.PACKAGE.rglob("*.py"):
            target = Path("copy", path.relative_to(ranks.PACKAGE))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
        for n in range(count):
            start, began = draw_start(draw, Path("copy")), time.monotonic()
            if text := problem(
                start, [PrefixStore(f"start {n}", client) for client in clients], pool
            ):
                wrong.append(f"start {n}, {start.kind}: {text}")
            longest = max(longest, time.monotonic() - began)
            kinds[start.kind] += 1
    return kinds, wrong, longest


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 if none would train with a difference, and all without one."""
    try:
        options = parse(Options, argv)
    except (UserError, KeyboardInterrupt) as error:
        stop(error)
    kinds, wrong, longest = starts(options.starts, options.seed)
    print(
        f"{options.starts} starts: "
        f"{', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}"
    )
    print(*wrong, f"{len(wrong)} wrong; the longest took {longest:.2f} s", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
