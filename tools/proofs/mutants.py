"""Change one line of the core at a time, and see whether the tests notice.

    python -m tools.proofs.mutants --draw 400 --seed 0 --results mutants.jsonl

The tests of its room judge a mutant. Rooms that many tests run are judged faster, and by all of them, with a record of
which test runs which line, of the same code:

    python -m pytest -n 2 -p tools.proofs.mutants_record --cov=megapipe --cov-context=test --cov-report= \\
        --junitxml=times.xml
    python -m tools.proofs.mutants --draw 400 --rooms models data --lines .coverage --times times.xml

A mutant has one operator, comparison, constant or condition changed, or one statement of one line left out. It is made
in a copy of the repository, where a fork of this process, which has imported torch already, runs the room's tests until
the first fails. What takes a minute, and four times what the tests take without a change, was killed too: it hangs.
With a record the fork has imported the package and collected the tests too (mutants_warm.py), unless an import runs the
line. Tests near the line and fast ones go first, until they take --seconds of CPU; --again judges what survived once
more, from the imports on. Results are appended to a file, so a run that was cut off goes on where it stood.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

from tools.proofs.mutants_lines import Lines
from tools.proofs.mutants_warm import Task, Warm, forked

ROOT = Path(__file__).parents[2]
COPIED = ("megapipe", "tests", "tools", "examples", "docs", "scripts", "README.md", "pretrain_gpt.py", "pyproject.toml")
WARM = ("hypothesis.strategies", "numpy", "pytest", "safetensors.torch", "torch.distributed.device_mesh", "tokenizers")

ROOMS = {
    "schedule": (
        "schedule: verify simulate lower dependencies passes",
        "schedule: verify verify_step clock lower transforms files own costs views/draw measured/traces measured/slow "
        "vocabulary schedule_properties generators/formulas",
    ),
    "transforms": (
        "schedule/families: step/optimizer step/reduction vocabulary/shares",
        "schedule: transforms vocabulary verify lower",
    ),
    "pipeline_parallel": (
        "pipeline_parallel: engine execute stage messages/messenger contracts/grad_sync",
        "pipeline_parallel: stage messages/messenger contracts/grad_sync execute contracts/forward_backward overlap "
        "contracts/megatron_contract own_tables vocabulary contracts/p2p",
    ),
    "optim": (
        "optim: optimizer reduction norm",
        "optim: steps optimizer buckets buffers rules rounded_state distributed",
    ),
    "checkpoint": (
        "checkpoint: commit resume",
        "checkpoint: folder same_meaning resume checkpoint retention saved_config commit",
    ),
}
"""Of each room the files of the package, and those of the tests that are to hold them, fast ones first."""

WHOLE = ("models", "convert", "plan", "training", "tensor_parallel", "distributed", "data")
"""Folders of the package whose mutants are judged by the tests that run the changed line."""


class Mutant(NamedTuple):
    """One line of one file, as it is and as it becomes."""

    room: str
    path: str
    line: int
    before: str
    after: str


def draw(rooms: Sequence[str], seed: int) -> list[Mutant]:
    """All mutants of some rooms, each once, in the order of a seed."""
    found: dict[Mutant, None] = {}
    for room in rooms:
        for path in _files(room):
            source = (ROOT / path).read_text()
            lines = source.splitlines()
            for line, start, end, text in _changes(ast.parse(source), lines):
                before = lines[line - 1]
                found[Mutant(room, path, line, before, before[:start] + text + before[end:])] = None
    drawn = list(found)
    random.Random(seed).shuffle(drawn)
    return drawn


def _files(room: str) -> list[str]:
    if room in WHOLE:
        return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "megapipe" / room).rglob("*.py"))
    folder, _, names = ROOMS[room][0].partition(": ")
    return [f"megapipe/{folder}/{name}.py" for name in names.split()]


Change = tuple[int, int, int, str]
"""Line, from column, to column, what stands there instead."""

OPERATORS = {
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "*", "**": "*", "|": "&", "&": "|", "<<": ">>", ">>": "<<",
    "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in", "not in": "in", "and": "or", "or": "and",
    "<": "<= >=", "<=": "< >", ">": ">= <=", ">=": "> <",
}  # fmt: skip
WORDS = re.compile(r"[\s)]*(is not|not in|\w+|[^\w\s()]+)")
SIMPLE = (ast.Expr, ast.AugAssign, ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Delete)


def _changes(tree: ast.AST, lines: Sequence[str]) -> Iterator[Change]:
    for node in _what_runs(tree):
        match node:
            case ast.BinOp():
                yield from _between(node.left, node.right, lines)
            case ast.Compare():
                for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                    yield from _between(left, right, lines)
            case ast.BoolOp():
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield from _between(left, right, lines)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                width = len("not ") if isinstance(node.op, ast.Not) else len("-")
                yield node.lineno, node.col_offset, node.col_offset + width, ""
            case ast.Constant():
                yield from _constant(node, lines)
            case ast.If() | ast.IfExp() | ast.While():
                yield from _negated(node.test, lines)
            case ast.comprehension():
                for test in node.ifs:
                    yield from _negated(test, lines)
        # Without the assignment to a name that is read, nothing runs.
        there = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
        if (there or isinstance(node, SIMPLE)) and node.lineno == node.end_lineno:  # type: ignore[attr-defined]
            yield node.lineno, node.col_offset, node.end_col_offset, "pass"  # type: ignore[attr-defined]


def _what_runs(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of code that runs: no types, docstrings, decorators, imports, texts of messages,
    assertions of the impossible, `strict` of zip."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "op", "ops", "ctx"):
            continue
        for child in value if isinstance(value, list) else [value]:
            match child:
                case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.keyword(arg="strict"):
                    continue
                case ast.Expr(value=ast.Constant() | ast.Yield(value=None)):
                    continue
                case ast.Constant() if isinstance(node, ast.JoinedStr):
                    continue
                case ast.Assign(value=ast.Subscript() | ast.BinOp(op=ast.BitOr())) if isinstance(node, ast.Module):
                    continue  # a type's name
                case ast.AST():
                    yield child
                    yield from _what_runs(child)


def _between(left: ast.expr, right: ast.expr, lines: Sequence[str]) -> Iterator[Change]:
    """The operator between two operands; where the line is broken, it stands before the second."""
    line = right.lineno
    start = (left.end_col_offset or 0) if left.end_lineno == line else 0
    found = WORDS.match(lines[line - 1][start : right.col_offset])
    if found and found[1] in OPERATORS:
        for new in re.split(r" (?=[<>])", OPERATORS[found[1]]):
            yield line, start + found.start(1), start + found.end(1), new


def _constant(node: ast.Constant, lines: Sequence[str]) -> Iterator[Change]:
    line, start, end = node.lineno, node.col_offset, node.end_col_offset or 0
    text = lines[line - 1][start:end]
    if isinstance(node.value, bool):
        yield line, start, end, str(not node.value)
    elif isinstance(node.value, int | float) and text[:1].isdigit():
        yield line, start, end, str(node.value + 1)
    elif isinstance(node.value, str) and re.fullmatch(r"[\"'][\w.-]+[\"']", text):  # a word: no message
        yield line, start + 1, start + 1, "not_"


def _negated(test: ast.expr, lines: Sequence[str]) -> Iterator[Change]:
    start, end = test.col_offset, test.end_col_offset or 0
    if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp) and test.lineno == test.end_lineno:
        yield test.lineno, start, end, f"not ({lines[test.lineno - 1][start:end]})"


def copy_repository(folder: Path) -> None:
    """Copy all that tests and proofs need to a folder, where it may be changed."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder)


class Judging(NamedTuple):
    """The way to judge a mutant by the tests that run its line.

    Attributes:
        lines: the record; None for rooms with tests of their own.
        warm: a process that has imported everything.
        seconds: tests are taken until they take so long; at least one.
        patience: on what hangs, as a multiple of a minute.
    """

    lines: Lines | None
    warm: Connection | None
    seconds: float
    patience: float


class Copy:
    """The repository where it may be changed, and forks of this process that run tests there."""

    def __init__(self, folder: Path, judges: Judging) -> None:
        self.folder, self.output = folder / "copy", folder / "output"
        self.judges = judges
        self.limits = dict.fromkeys(ROOMS, 600.0)  # seconds
        self.changes = 0
        self.folder.mkdir(parents=True)
        copy_repository(self.folder)
        others = [path for path in sys.path if not Path(path).is_relative_to(ROOT)]
        sys.path[:] = [str(self.folder), *others]
        os.environ |= {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}  # a fork has one thread only
        for name in WARM:
            import_module(name)

    def check(self, mutants: Sequence[Mutant]) -> None:
        """Run the tests of rooms on unchanged code, which compiles everything.

        Raises: SystemExit if they fail.
        """
        for room in dict.fromkeys(mutant.room for mutant in mutants if mutant.room in ROOMS):
            result, by, seconds = self.run(self.tests_of(room), self.limits[room])
            print(f"{room}: {seconds:.1f} s without a change", flush=True)
            self.limits[room] = max(60.0, 4 * seconds)
            if result != "survived":
                raise SystemExit(f"{self.output.read_text()}\nThe tests of {room} fail without a change: {result} {by}")

    def judge(self, mutant: Mutant) -> dict[str, object]:
        """Return the outcome of a mutant: it is killed, hangs, or has survived."""
        path = self.folder / mutant.path
        source, stat = path.read_text(), path.stat()
        lines = source.splitlines()
        lines[mutant.line - 1] = mutant.after
        changed = "\n".join(lines) + "\n"
        path.write_text(changed)
        # A source of another second is compiled anew; what was compiled of the old one holds again afterwards.
        self.changes += 1
        os.utime(path, (stat.st_atime, int(stat.st_mtime) + self.changes))
        if mutant.room in ROOMS:
            result, by, seconds = self.run(self.tests_of(mutant.room), self.limits[mutant.room])
        else:
            result, by, seconds = self._of_lines(mutant, source, changed)
        path.write_text(source)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return {**mutant._asdict(), "result": result, "by": by, "seconds": round(seconds, 1)}

    def _of_lines(self, mutant: Mutant, source: str, changed: str) -> tuple[str, str, float]:
        lines, warm, most, patience = self.judges
        assert lines is not None
        tests, expected, imports = lines.judges(mutant.path, source, mutant.line, most)
        if not tests:
            return "survived", "no test", 0.0
        limit = max(60.0, 4 * expected) * patience
        if warm and not imports:
            warm.send(Task(str(self.folder), mutant.path, changed, tests, limit))
            result, by, seconds = warm.recv()
            if result != "cold":
                return result, by, seconds
        return self.run(tests, 60 * patience + limit)

    def tests_of(self, room: str) -> list[str]:
        """Return the files with a room's tests."""
        folder, _, names = ROOMS[room][1].partition(": ")
        paths = (Path("tests", folder, name) for name in names.split())
        return [str(path.with_name(f"test_{path.name}.py")) for path in paths]

    def run(self, tests: Sequence[str], limit: float) -> tuple[str, str, float]:
        """Run tests until the first fails. Returns the result, the test that failed, and seconds."""
        result, seconds = forked(lambda: self._pytest(["-x", *tests]), limit)
        failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", self.output.read_text(errors="replace"), re.M)
        return result, failed[1] if failed else "", seconds

    def serve(self, jobs: int) -> list[Connection]:
        """Start a process with everything imported and collected, and return connections to `jobs` forks of it."""
        assert self.judges.lines is not None
        pairs = [Pipe() for _ in range(jobs)]
        if not os.fork():
            self._pytest(self.judges.lines.files(), [Warm([there for _, there in pairs], self.folder)])
            os._exit(0)
        here = [here for here, _ in pairs]
        for connection in here:
            connection.recv()
        return here

    def _pytest(self, arguments: Sequence[str], plugins: Sequence[object] = ()) -> int:
        output = os.open(self.output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(self.folder)
        sys.modules["__main__"] = type(sys)("__main__")  # what multiprocessing starts would import this file
        options = ["-q", "--tb=short", "-p", "no:xdist", "-p", "no:cacheprovider"]
        status: int = import_module("pytest").main([*options, *arguments], plugins)
        return status


def report(judged: Sequence[dict[str, object]]) -> str:
    """The survivors, each with its line before and after, and the numbers by room."""
    lines = []
    for x in judged:
        if x["result"] == "survived":
            lines += [f"{x['path']}:{x['line']}", f"- {str(x['before']).strip()}", f"+ {str(x['after']).strip()}", ""]
    lines += ["| room | drawn | killed | of these hang | survived |", "|---|---|---|---|---|"]
    for room in [*ROOMS, *WHOLE, "all"]:
        found = Counter(str(x["result"]) for x in judged if room in (x["room"], "all"))
        if total := found.total():
            lines.append(f"| {room} | {total} | {total - found['survived']} | {found['hangs']} | {found['survived']} |")
    return "\n".join(lines)


def read(results: Path) -> dict[Mutant, dict[str, object]]:
    """Return the outcome of each mutant, the last one that was written."""
    known = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        found = json.loads(line)
        known[Mutant(*(found[name] for name in Mutant._fields))] = found
    return known


def _work(folder: Path, results: Path, judges: Judging, left: Sequence[Mutant]) -> NoReturn:
    """The process that judges some of them."""
    status = 1
    try:
        copy = Copy(folder, judges)
        copy.check(left)
        with results.open("a") as file:
            for mutant in left:
                found = copy.judge(mutant)
                print(json.dumps(found), file=file, flush=True)
                print("{result:8} {seconds:5} s {path}:{line} {by}".format(**found), flush=True)
        if judges.warm:
            judges.warm.send(None)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> int:
    """The exit status: 1 if fewer than 95% are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, default=100, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="+", choices=[*ROOMS, *WHOLE], default=list(ROOMS))
    parser.add_argument("--lines", type=Path, help="coverage's data: which test runs which line")
    parser.add_argument("--times", type=Path, help="a JUnit report: how long each test takes")
    parser.add_argument("--seconds", type=float, default=60, help="tests of a line are taken until they take so long")
    parser.add_argument("--patience", type=float, default=1, help="what hangs has so many times a minute")
    parser.add_argument("--jobs", type=int, default=1, help="processes that judge")
    parser.add_argument("--results", type=Path, default=Path("mutants.jsonl"), help="one line each, appended")
    parser.add_argument("--again", action="store_true", help="again those that survived or hang, imports too")
    args = parser.parse_args()
    if not args.lines and set(args.rooms) & set(WHOLE):
        parser.error(f"--rooms {' '.join(WHOLE)} need --lines and --times")
    drawn, known = draw(args.rooms, args.seed)[: args.draw], read(args.results)
    left = [m for m in drawn if m not in known or (args.again and known[m]["result"] != "killed")]
    lines = Lines(args.lines, args.times) if args.lines else None
    judging = Judging(lines, None, args.seconds, args.patience)
    with tempfile.TemporaryDirectory() as folder:
        warm: list[Connection | None] = [None] * args.jobs
        if lines and not args.again:
            warm[:] = Copy(Path(folder, "warm"), judging).serve(args.jobs)
        workers = [
            os.fork() or _work(Path(folder, str(n)), args.results, judging._replace(warm=end), left[n :: args.jobs])
            for n, end in enumerate(warm)
        ]
        failed = [os.waitpid(worker, 0)[1] for worker in workers]
    if any(failed):
        return 2
    known = read(args.results)
    judged = [known[mutant] for mutant in drawn]
    print(report(judged))
    return int(sum(x["result"] != "survived" for x in judged) < 0.95 * len(judged))


if __name__ == "__main__":
    sys.exit(main())
