"""What the docs show of schedules: each has a section and a picture, and tables, programs and files there are true."""

from __future__ import annotations

import contextlib
import io
import re
from itertools import product
from pathlib import Path

import pytest

from megapipe.schedule import SCHEDULES, Costs, ScheduleError, build, simulate
from megapipe.schedule.core.compiled import library
from megapipe.schedule.core.cuts import Cutting
from megapipe.schedule.ingredients import FixedCosts
from megapipe.schedule.patterns import SLICED
from megapipe.schedule.text import from_csv, from_json
from megapipe.schedule.views.compare import Row, compare, measure
from megapipe.schedule.views.features.sliced import in_slices
from tools.docs import pictures

ROOT = Path(__file__).resolve().parents[1]
DOC = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
SLICES = (ROOT / "docs" / "long_sequences.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIXED = [name for name in SCHEDULES if name != "zb-auto"]


def compare_labels(name: str) -> list[Row]:
    costs = Costs(10, 11, 8)
    if SCHEDULES[name].chunks is not None:
        return [measure(build(name, 8, 16, costs=costs), costs)]
    return [measure(build(name, 8, 16, chunks=v, costs=costs), costs, f"{name} v={v}") for v in (2, 4)]


def test_committed_pictures_are_what_the_command_makes():
    searched = [] if library() is None else ["zb-auto"]
    for name in [*FIXED, *SLICED, *searched, "1f1b-vocabulary", *pictures.PARTS]:
        committed = ROOT / "docs" / "schedules" / f"{name}.svg"
        assert pictures.drawn(name) == committed.read_text(encoding="utf-8"), f"run tools/docs/pictures.py {name}"


def test_each_picture_of_another_page_stands_next_to_its_command():
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    for name, command in pictures.PARTS.items():
        (page,) = (page for page in pages if f"](schedules/{name}.svg)" in page)
        assert f"$ megapipe schedules show {command}\n" in page


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


@pytest.mark.parametrize("p", [4, 5, 8])
@pytest.mark.parametrize("v", [2, 4])
def test_the_readme_formula_of_group_interleaved_is_what_show_says(p, v):
    """It said "between interleaved's and 1F1B's", and with two chunks it waits less than interleaved."""
    (line,) = (line for line in README.splitlines() if line.startswith("| `group-interleaved` |"))
    bubble, memory = line.split(" | ")[1:3]
    assert bubble == "((p-1)(F+B) + (p-g)(v-1)F)/v at F = B = W"
    assert memory == "(p + (v-1) g)/v, g from p/2 to p"
    for g in range((p + 1) // 2, p + 1):
        time = simulate(build("group-interleaved", p, 2 * g, chunks=v, microbatch_group_size_per_vp_stage=g))
        assert time.bubble == pytest.approx(((p - 1) * (1 + 1) + (p - g) * (v - 1) * 1) / v)
        assert max(time.peak) == pytest.approx((p + (v - 1) * g) / v)


@pytest.mark.parametrize("p", [4, 6, 9, 16])
def test_the_readme_bounds_of_the_v_schedules_hold(p):
    """It said that v-min waits about as long as 1F1B, and nothing of the microbatch more where 3 divides p."""
    for name, bound in (("v-half", 1 / 2), ("v-min", 2 / 3)):
        said = {1 / 2: "below half of 1F1B's at F = B = W", 2 / 3: "below 2/3 of 1F1B's at F = B = W"}[bound]
        assert f"| `{name}` | {said} |" in README
        assert simulate(build(name, p, 2 * p)).bubble < bound * 3 * (p - 1)
    assert "| (2p+2)//3, one more where 3 divides p |" in README
    assert max(simulate(build("1f1b-v", p, 2 * p)).peak) == (2 * p + 2) // 3 + (p % 3 == 0)


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


def refused_in_slices(name: str) -> bool:
    """Are backwards of the schedule left to wait for slices that come after them, at some size?"""
    for (p, n), more in product([(4, 2), (4, 3), (8, 2)], (0, 1)):
        try:
            in_slices(name, p, p + more, Costs(), cutting=Cutting(n, "work")).build(FixedCosts())
        except ScheduleError as error:
            if "its backwards wait for slices" in str(error):
                return True
    return False


def test_the_docs_name_the_schedules_that_some_numbers_of_slices_are_refused_for():
    named = re.search(r"slices of its microbatch\. So (.*?) are refused", SLICES, re.DOTALL)[1]
    assert set(re.findall(r"`(.*?)`", named)) == set(filter(refused_in_slices, FIXED))


@pytest.mark.parametrize(("name", "least"), [("interleaved", "p + (p-1)/v"), ("interleaved-zb", "p")])
def test_memory_of_interleaved_is_as_documented_where_p_divides_m_and_where_not(name, least):
    section = DOC.split(f"### {name}\n")[1].split("\n##")[0]
    formula = re.search(r"up\s+to\s+(\S+) more", section)[1].replace(")(", ")*(")
    for p, v in product((2, 3, 5), (2, 3, 4)):
        bound = eval(least, {"p": p, "v": v})
        peaks = {m: max(simulate(build(name, p, m, chunks=v)).peak) for m in range(p + 1, 3 * p + 1)}
        assert [peaks[m] for m in (2 * p, 3 * p)] == pytest.approx([bound, bound])
        assert max(peaks.values()) == pytest.approx(bound + eval(formula, {"p": p, "v": v}))
