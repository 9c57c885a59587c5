"""The mutants of the core: each a line of a file as it is, and as it becomes."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
_ROOMS = {
    "schedule": """
schedule: verify simulate lower dependencies passes
schedule: verify verify_step clock lower transforms files own costs views/draw measured/traces \
measured/slow vocabulary schedule_properties generators/formulas
""",
    "transforms": """
schedule/families: step/optimizer step/reduction vocabulary/shares
schedule: transforms vocabulary verify lower
""",
    "pipeline_parallel": """
pipeline_parallel: engine execute stage messages/messenger contracts/grad_sync
pipeline_parallel: stage messages/messenger contracts/grad_sync execute \
contracts/forward_backward overlap contracts/megatron_contract own_tables vocabulary contracts/p2p
""",
    "optim": """
optim: optimizer reduction norm
optim: steps optimizer buckets buffers rules rounded_state distributed
""",
    "checkpoint": """
checkpoint: commit resume
checkpoint: folder same_meaning resume checkpoint retention saved_config commit
""",
}
ROOMS = {room: lines.strip().splitlines() for room, lines in _ROOMS.items()}
"""Of each room the files of the package, and those of the tests that are to hold them, fast ones
first.
"""

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
        return sorted(
            str(path.relative_to(ROOT)) for path in (ROOT / "megapipe" / room).rglob("*.py")
        )
    folder, _, names = ROOMS[room][0].partition(": ")
    return [f"megapipe/{folder}/{name}.py" for name in names.split()]


Change = tuple[int, int, int, str]
"""Line, from column, to column, what stands there instead."""

_OPERATORS = """
+ -  - +  * +  / *  // *  % *  ** *  | &  & |  << >>  >> <<
== !=  != ==  is is_not  is_not is  in not_in  not_in in  and or  or and
< <=  < >=  <= <  <= >  > >=  > <=  >= >  >= <
"""
"""Pairs of an operator and what it becomes; `_` stands for a space within one."""
PAIRS = [pair.split(" ") for pair in re.split(r"  |\n", _OPERATORS.strip())]
WORDS = re.compile(r"[\s)]*(is not|not in|\w+|[^\w\s()]+)")
SIMPLE = (ast.Expr, ast.AugAssign, ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Delete)


def _changes(tree: ast.AST, lines: Sequence[str]) -> Iterator[Change]:
    for node in _what_runs(tree):
        match node:
            case ast.BinOp():
                yield from _between(node.left, node.right, lines)
            case ast.Compare():
                for left, right in zip(
                    [node.left, *node.comparators], node.comparators, strict=False
                ):
                    yield from _between(left, right, lines)
            case ast.BoolOp():
                for left, right in pairwise(node.values):
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
        simple = isinstance(node, SIMPLE)
        if isinstance(node, ast.Assign):
            simple = isinstance(node.targets[0], ast.Attribute | ast.Subscript)
        if simple and isinstance(node, ast.stmt) and node.lineno == node.end_lineno:
            yield node.lineno, node.col_offset, node.end_col_offset or 0, "pass"


def _what_runs(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of code that runs.

    These are no types, docstrings, decorators, imports, texts of messages, assertions of the
    impossible, `strict` of zip.
    """
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
                case ast.Assign(value=ast.Subscript() | ast.BinOp(op=ast.BitOr())) if isinstance(
                    node, ast.Module
                ):
                    continue  # a type's name
                case ast.AST():
                    yield child
                    yield from _what_runs(child)


def _between(left: ast.expr, right: ast.expr, lines: Sequence[str]) -> Iterator[Change]:
    """The operator between two operands; where the line is broken, it stands before the second."""
    line = right.lineno
    start = (left.end_col_offset or 0) if left.end_lineno == line else 0
    found = WORDS.match(lines[line - 1][start : right.col_offset])
    for old, new in PAIRS:
        if found and found[1] == old.replace("_", " "):
            yield line, start + found.start(1), start + found.end(1), new.replace("_", " ")


def _constant(node: ast.Constant, lines: Sequence[str]) -> Iterator[Change]:
    line, start, end = node.lineno, node.col_offset, node.end_col_offset or 0
    text = lines[line - 1][start:end]
    if isinstance(node.value, bool):
        yield line, start, end, str(not node.value)
    elif isinstance(node.value, int | float) and text[:1].isdigit():
        yield line, start, end, str(node.value + 1)
    elif isinstance(node.value, str) and re.fullmatch(
        r"[\"'][\w.-]+[\"']", text
    ):  # a word: no message
        yield line, start + 1, start + 1, "not_"


def _negated(test: ast.expr, lines: Sequence[str]) -> Iterator[Change]:
    start, end = test.col_offset, test.end_col_offset or 0
    if (
        not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp)
        and test.lineno == test.end_lineno
    ):
        yield test.lineno, start, end, f"not ({lines[test.lineno - 1][start:end]})"
