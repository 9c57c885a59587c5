"""Which tests run a line: what coverage and a JUnit report have recorded, see record.py."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

NEAR = 10.0
"""A test of the line's own room may take so much longer than another, and still goes first."""

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Judges(NamedTuple):
    """Tests in their order, and the seconds that they take."""

    tests: list[str]
    seconds: float


class Lines:
    """Which tests run which line, as coverage and a JUnit report have recorded it."""

    def __init__(self, lines: Path, times: Path) -> None:
        data = import_module("coverage").CoverageData(str(lines))
        data.read()
        self._tests = {path: data.contexts_by_lineno(path) for path in data.measured_files()}
        data.close()  # a fork that reads it would erase the file
        self._seconds: dict[str, float] = {}
        for case in ElementTree.parse(times).iter("testcase"):
            if not {"failure", "error", "skipped"} & {part.tag for part in case}:
                test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
                self._seconds[test] = _seconds(case)

    def files(self) -> list[str]:
        """Return the files with tests."""
        return sorted({test.partition("::")[0] for test in self._seconds})

    def judges(self, path: str, source: str, line: int, limit: float) -> Judges:
        """Return the tests that run a line: near and fast ones first, until they take `limit`
        seconds.

        Of a line that an import runs, and of one that nobody was seen to run, these are the tests
        of its file: those that were seen to run a line of it, and those in the test file of its
        name, which may start processes.
        """
        of_lines: dict[int, list[str]] = next(
            (tests for name, tests in self._tests.items() if name.endswith(f"/{path}")), {}
        )
        inside, statement = _place(ast.parse(source), line)
        contexts = {context for n in statement for context in of_lines.get(n, ())}
        imports = not inside or "" in contexts
        found = _named(contexts)
        if not found or imports:
            named = {test for test in self._seconds if f"/test_{Path(path).stem}.py::" in test}
            found = named.union(*map(_named, of_lines.values()))
        tests: list[str] = []
        seconds = 0.0
        room = "/".join(["tests", *Path(path).parts[1:2], ""])
        for test in sorted(found & self._seconds.keys(), key=lambda test: self._cost(test, room)):
            if tests and seconds + self._seconds[test] > limit:
                break
            tests.append(test)
            seconds += self._seconds[test]
        return Judges(tests, seconds)

    def _cost(self, test: str, room: str) -> float:
        return self._seconds[test] / (NEAR if test.startswith(room) else 1)


def _seconds(case: ElementTree.Element) -> float:
    for entry in case.iter("property"):
        if entry.get("name") == "cpu_seconds":
            return float(entry.get("value", 0))
    return float(case.get("time", 0))


def _named(contexts: Iterable[str]) -> set[str]:
    return {context.rpartition("|")[0] for context in contexts if "|" in context}


def _place(tree: ast.AST, line: int) -> tuple[bool, range]:
    """Return whether a line lies in the body of a function, and the lines of its statement without
    its body.
    """
    inside, statement = False, range(line, line + 1)
    for node in _around(tree, line):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or line
            first = node.lineno
            if line <= max(end, first):
                statement = range(first, max(end, first) + 1)
            inside = inside or (isinstance(node, FUNCTION) and line > end)
    return inside, statement


def _around(node: ast.AST, line: int) -> Iterator[ast.AST]:
    """All nodes that a line lies in, outer ones first."""
    for child in ast.iter_child_nodes(node):
        if getattr(child, "lineno", line) <= line <= getattr(child, "end_lineno", line):
            yield child
            yield from _around(child, line)
