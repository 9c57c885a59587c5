"""What the docs show of schedules: each has a section and a picture, and tables, programs and files there are true."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from megapipe.schedule import SCHEDULES, Costs, build, simulate
from megapipe.schedule.patterns import SLICED
from megapipe.schedule.text import from_csv, from_json
from megapipe.schedule.views.compare import Row, compare, measure
from tools.docs import pictures

ROOT = Path(__file__).resolve().parents[1]
DOC = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
FIXED = [name for name in SCHEDULES if name != "zb-auto"]


def compare_labels(name: str) -> list[Row]:
    costs = Costs(10, 11, 8)
    if SCHEDULES[name].chunks is not None:
        return [measure(build(name, 8, 16, costs=costs), costs)]
    return [measure(build(name, 8, 16, chunks=v, costs=costs), costs, f"{name} v={v}") for v in (2, 4)]


def test_committed_pictures_are_what_the_command_makes():
    for name in [*FIXED, *SLICED, "zb-auto", "1f1b-vocabulary"]:
        committed = ROOT / "docs" / "schedules" / f"{name}.svg"
        assert pictures.drawn(name) == committed.read_text(encoding="utf-8"), f"run tools/docs/pictures.py {name}"


def test_the_docs_have_a_section_and_a_picture_for_every_schedule():
    for name in [*SCHEDULES, *SLICED]:
        assert f"### {name}\n\n![{name}](schedules/{name}.svg)" in DOC


def test_the_table_in_the_docs_is_measured():
    rows = [row for name in FIXED for row in compare_labels(name)]
    for row in rows:
        line = next(line for line in DOC.splitlines() if line.startswith(f"{row.label}  "))
        numbers = [float(x) for x in re.findall(r"(?<= )[\d.]+(?= |$)", line.removeprefix(row.label).replace(" %", ""))]
        expected = [row.makespan, row.period, row.bubble, 100 * row.bubble_share, row.peak, row.parameters, row.sent]
        assert numbers == pytest.approx(expected, abs=0.051), line


def test_the_schedule_written_in_the_docs_runs_and_prints_what_they_say(monkeypatch):
    function, use = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    printed = re.search(r"prints\n\n```\n(28.*?)```", DOC, re.DOTALL)
    assert function.split("def eager")[1] in ROOT.joinpath("examples/own_schedule.py").read_text().replace(
        '    """1F1B with twice the warm-up, which hides the round trip of slow messages; memory 2p-1"""\n', ""
    )
    monkeypatch.chdir(ROOT)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(use, {})
    assert out.getvalue() == printed[1]


def test_the_docs_build_with_the_costs_that_they_simulate_as_compare_does():
    """v-half without costs waits 104.5, with 104: what the docs wrote was not the row of `compare`."""
    *_, use = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    calls = re.findall(r"build\(([^()]*)\)", use)
    assert len(calls) == 2
    assert all("costs=costs" in call for call in calls)
    costs = Costs(10, 11, 8)
    (row,) = (row for row in compare(8, 16, costs, names=["v-half"]) if row.label == "v-half")
    assert row.bubble == simulate(build("v-half", 8, 16, costs=costs), costs).bubble
    assert row.bubble < simulate(build("v-half", 8, 16), costs).bubble


def test_the_files_written_in_the_docs_load(tmp_path):
    for kind, read in (("csv", from_csv), ("json", from_json)):
        text = re.search(rf"```{kind}\n(.*?)```", DOC, re.DOTALL)[1]
        assert read(text).ranks == build("1f1b", 2, 2).ranks
