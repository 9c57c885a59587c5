"""The tests that judge a mutant, and the end of a fork that runs them."""

from __future__ import annotations

import time

import pytest
from coverage import CoverageData

from tools.proofs.mutants.copy import Copy, forked
from tools.proofs.mutants.lines import Lines

SOURCE = """\
NUMBER = 1

class Counter:
    step = 2

    def after(
        self, n,
    ):
        if n:
            return (n +
                    self.step)
        return 0

def scaled(by):
    return [lambda x: by * x][0]
"""
TIMES = """\
<testsuites><testsuite>
<testcase classname="tests.room.test_a" name="test_slow" time="1"><properties><property name="cpu_seconds" value="30"/>
</properties></testcase>
<testcase classname="tests.room.test_a" name="test_near" time="4"/>
<testcase classname="tests.other.test_b" name="test_fast" time="1"/>
<testcase classname="tests.other.test_b" name="test_that_fails" time="1"><failure/></testcase>
</testsuite></testsuites>
"""
SLOW, NEAR = "tests/room/test_a.py::test_slow", "tests/room/test_a.py::test_near"
FAST, FAILS = "tests/other/test_b.py::test_fast", "tests/other/test_b.py::test_that_fails"


@pytest.fixture
def lines(tmp_path):
    data = CoverageData(str(tmp_path / "lines"))
    for context, found in ((SLOW, [12]), (NEAR, [10, 15]), (FAST, [9, 10, 12]), (FAILS, [9]), ("", [1, 3, 4, 6, 14])):
        data.set_context(f"{context}|run" if context else "")
        data.add_lines({"/elsewhere/megapipe/room/file.py": found})
    data.write()
    (tmp_path / "times.xml").write_text(TIMES)
    return Lines(tmp_path / "lines", tmp_path / "times.xml")


@pytest.mark.parametrize(
    "line, limit, tests, seconds",
    [
        (9, 99, [FAST], 1),
        (10, 99, [NEAR, FAST], 5),
        (11, 99, [NEAR, FAST], 5),  # of the statement that goes on there
        (12, 99, [FAST, SLOW], 31),
        (12, 20, [FAST], 1),
        (12, 0, [FAST], 1),  # at least one
        (4, 99, [NEAR, FAST, SLOW], 35),
        (7, 99, [NEAR, FAST, SLOW], 35),
    ],
)
def test_the_tests_that_run_a_line_judge_it_near_and_fast_ones_first(lines, line, limit, tests, seconds):
    assert lines.judges("megapipe/room/file.py", SOURCE, line, limit) == (tests, seconds)


def test_a_file_that_nobody_was_seen_to_run_is_judged_by_the_tests_of_its_name(lines):
    assert lines.judges("megapipe/room/other.py", SOURCE, 9, 99).tests == []
    assert lines.judges("megapipe/room/a.py", SOURCE, 9, 99).tests == [NEAR, SLOW]


@pytest.mark.parametrize("status, result", [(0, "survived"), (1, "killed")])
def test_a_fork_ends_with_what_became_of_the_mutant(status, result):
    assert forked(lambda: status, 60)[0] == result


def test_a_fork_that_does_not_end_hangs():
    assert forked(lambda: time.sleep(60) or 0, 0.1)[0] == "hangs"


@pytest.mark.parametrize("tests, outcome", [(["a", "gone"], ("killed", "a")), (["gone"], ("survived", "no such test"))])
def test_a_test_that_is_not_there_kills_no_mutant(tmp_path, tests, outcome):
    """pytest ended with an error of its own, and the mutant counted as killed."""
    copy = object.__new__(Copy)
    copy.output = tmp_path / "output"

    def pytest_of(words):
        copy.output.write_text("ERROR: not found: /copy/gone\n" if "gone" in words else "FAILED a - x\n")
        return 4 if "gone" in words else 1

    copy._pytest = pytest_of
    assert copy.run(tests, 60)[:2] == outcome
