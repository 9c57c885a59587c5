"""The family of docs/extending.md, in a copy of the package: two files, three changed ones, and everything follows."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8").partition("## A kind of pass of your own")[2]
BLOCKS = re.findall(r"`(megapipe/[^`]+\.py)`:\n\n```(python|diff)\n(.*?)```", PAGE, re.DOTALL)


def changed(source: str, diff: str) -> str:
    """Return a text after a diff whose lines of context stand in it once each, in this order."""
    lines, at = source.splitlines(), 0
    said = diff.splitlines()
    for number, (mark, line) in enumerate((x[0], x[1:]) for x in said):
        if mark == "+":
            later = next((x for x in said[number:] if x[0] != "+"), None)
            at = lines.index(later[1:]) if number == 0 else at
            lines.insert(at, line)
            at += 1
        else:
            assert lines.count(line) == 1, line
            at = lines.index(line) + (mark == " ")
            if mark == "-":
                del lines[at]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "megapipe", folder / "megapipe", ignore=shutil.ignore_patterns("__pycache__"))
    for name, kind, text in BLOCKS:
        path = folder / name
        assert path.exists() == (kind == "diff")
        path.write_text(changed(path.read_text(), text) if kind == "diff" else text)
    program = ROOT / "tests" / "pipeline_parallel" / "with_checksum.py"
    support = ROOT / "tests" / "support"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (folder, support, support / "models")))}
    done = subprocess.run(
        [sys.executable, str(program)], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # a run prints what it does before


def test_it_is_a_file_on_two_floors_and_few_lines_of_three_others():
    names = {kind: {name for name, of, _ in BLOCKS if of == kind} for kind in ("python", "diff")}
    assert {Path(name).name for name in names["python"]} == {"checksum.py"}
    assert len(names["python"]) == 2
    assert len(names["diff"]) == 3
    written = [line for _, kind, text in BLOCKS for line in text.splitlines() if kind == "python" or line[0] == "+"]
    assert len(written) <= 150


def test_it_is_verified_by_its_own_rule(told):
    assert "rank 0, step 8, 0K0: stands after a backward of its stage" in told["late"]


def test_it_is_timed_by_its_costs_beside_the_passes(told):
    assert told["of a checksum"] == [0, 0.5]
    assert told["makespans"][0] == told["makespans"][1]


def test_it_is_drawn_and_stands_in_files(told):
    assert "K checksum" in told["terminal"]
    assert ">K checksum<" in told["svg"]
    assert told["same"]


def test_it_runs_once_a_step_in_training_and_changes_nothing(told):
    for rank, plain in zip(told["checked"], told["plain"], strict=True):
        assert rank["losses"] == plain["losses"]
        assert plain["seen"] == []
        (sums,) = zip(*rank["sums"], strict=True)
        assert [seen for _, seen, _ in rank["seen"]] == [[one, one] for one in sums], "both data-parallel ranks"
        assert all(seconds > 0 for _, _, seconds in rank["seen"])
