"""A kind that nobody knows: with_peek.py adds one by a row, a transform and an entry, and everything else follows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def told():
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline_parallel.with_peek"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_verified(told):
    assert told["late"].startswith("gpipe cannot proceed:\n")
    assert "\n  rank 0 waits at step 10, 0BW3, for 0Q3" in told["late"]


def test_it_is_simulated_beside_the_others(told):
    assert told["makespans"][0] == told["makespans"][1]
    assert told["busy"][0] == told["busy"][1]
    assert told["of a peek"] == [0, 0.5], "it starts behind its forward and takes its cost"


def test_it_is_drawn_on_its_lane(told):
    lanes = [line.split("|")[0].strip() for line in told["terminal"].splitlines()]
    assert lanes[:4] == ["rank 0", "side", "rank 1", "side"]
    assert "Q peek" in told["terminal"]
    assert ">Q peek<" in told["svg"]
    assert told["svg"].count(">side<") == 2
    assert told["perfetto"] == ["BW", "F", "Q"]


def test_it_runs_beside_and_is_waited_for_by_what_needs_it(told):
    assert [peeked for peeked, _ in told["ran"]] == [[0, 1, 2, 3]] * 2


def test_what_it_runs_beside_is_timed(told):
    for _, ran in told["ran"]:
        assert ran == told["passes"]
