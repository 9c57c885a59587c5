"""Figures have the numbers of the clock, the files that were asked for, and a refusal where nothing can draw them."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ElementTree
from importlib import util
from pathlib import Path

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule import Costs, build, simulate, to_csv
from megapipe.schedule.families.offload.copies import with_offload
from megapipe.schedule.families.vocabulary.shares import with_vocabulary
from megapipe.schedule.views.figure import Files
from megapipe.schedule.views.scene import scene_of
from megapipe.schedule.views.study import draw, study, told
from megapipe.schedule.views.study import to_csv as study_to_csv
from megapipe.schedule.views.timeline import draw_memory, draw_schedule

needs_matplotlib = pytest.mark.skipif(util.find_spec("matplotlib") is None, reason="the extra `plot` is not installed")
COSTS = [Costs(10, 11, 8), Costs(10, 11, 8, comm=1)]


def points(ranks=(2, 4), microbatches=(4, 8), costs=COSTS, names=("zb-h1", "dualpipe")):
    return study(ranks, microbatches, costs, None, names, 1.0, lambda share, doing: None)


def words(drawn: dict[Path, bytes]) -> str:
    (picture,) = drawn.values()
    return " ".join(text.strip() for text in ElementTree.fromstring(picture).itertext() if text.strip())


def test_a_study_has_the_papers_bubbles_at_every_point_and_says_who_is_refused():
    rows = list(csv.DictReader(io.StringIO(study_to_csv(points()))))
    assert len(rows) == 2 * 2 * 2 * 3
    for row in rows:
        p, m = int(row["ranks"]), int(row["microbatches"])
        if row["costs"] == "F:B:W = 10:11:8" and row["label"] != "dualpipe":
            bubble = (p - 1) * (10 + 11 + 8 if row["label"] == "1f1b" else 10 + 11 - 8)
            assert float(row["bubble"]) == bubble
            assert float(row["bubble_share"]) == pytest.approx(bubble / (29 * m + bubble))
    assert {(r["ranks"], r["microbatches"]) for r in rows if r["refused"]} == {("4", "4")}  # dualpipe: m >= 2p
    assert told(Costs((1, 3), 2, 2, comm=0.5)) == "mean F:B:W = 2:2:2 message 0.5"


@needs_matplotlib
@pytest.mark.parametrize(
    ("name", "said"), [("1f1b", None), ("zb-v", "lighter: later chunk"), ("dualpipe", "lighter: second direction")]
)
def test_a_legend_says_what_lighter_colours_and_grey_lanes_are(name, said):
    schedule = build(name, 4, 8)
    plain = words(draw_schedule(schedule, Files(svg="a.svg", width=7)))
    assert [text for text in ("later chunk", "second direction") if text in plain] == ([said[9:]] if said else [])
    assert "bubble" in plain
    assert "idle: between passes" not in plain
    if name == "1f1b":
        copied = draw_schedule(with_offload(schedule, Costs(o=1, l=1)), Files(svg="a.svg", width=7))
        assert "idle: between passes a bubble" in words(copied)


@needs_matplotlib
def test_microbatches_of_two_digits_have_their_numbers_where_there_is_room():
    said = words(draw_schedule(build("1f1b", 8, 32), Files(svg="a.svg", width=9))).split()
    assert min(said.count(str(n)) for n in range(32)) >= 2 * 8  # F and BW of each rank


@needs_matplotlib
def test_the_figure_of_a_study_names_axes_schedules_panels_and_what_is_the_same():
    same = points(costs=COSTS[:1])
    text = words(draw(same, Files(svg="a.svg", width=7))).replace("\xa0", " ")
    for said in ("p = 2", "p = 4", "microbatches", "bubble, % of the period", "zb-h1", "at F:B:W = 10:11:8; lower"):
        assert said in text, said
    both = draw(same, Files(pdf="a.pdf", png="a.png"))
    assert both[Path("a.pdf")].startswith(b"%PDF")
    assert both[Path("a.png")].startswith(b"\x89PNG")
    assert draw(same, Files(svg="a.svg")) == draw(same, Files(svg="a.svg"))


@needs_matplotlib
def test_any_name_of_a_file_can_be_drawn(tmp_path):
    odd = tmp_path / "a$b$\\frac{\x07.csv"
    odd.write_text(to_csv(build("1f1b", 2, 4)))
    text = words(draw(points((2,), (4,), COSTS[:1], names=(str(odd),)), Files(svg="a.svg")))
    assert "a$b$\\frac{\\x07.csv" in text


@needs_matplotlib
def test_one_point_is_a_bar_for_each_schedule_with_its_makespan():
    text = words(draw(points((4,), (8,), COSTS[:1]), Files(svg="a.svg")))
    for name in ("1f1b", "zb-h1", "dualpipe"):
        assert re.search(rf"\b{simulate(build(name, 4, 8), COSTS[0]).makespan:g}\b", text), name


@needs_matplotlib
def test_a_schedule_and_what_its_ranks_hold_are_figures_of_the_clock():
    table = build("dualpipe", 4, 8)
    time, tracks = simulate(table), scene_of(table).tracks
    boxes = [box for track in tracks for box in track.boxes]
    assert {box.item: (box.start, box.end) for box in boxes} == {x: (time.start[x], time.end[x]) for x in time.start}
    assert {len(step) for track in tracks for step in track.steps} == {1, 2}  # a pair shares its height
    said = words(draw_schedule(table, Files(svg="a.svg")))
    assert "dualpipe on 4 ranks, 8 microbatches: makespan" in said
    said = words(draw_memory(build("1f1b", 4, 8), Files(svg="b.svg"), Costs(), memory=5))
    assert all(f"rank {r}, peak {4 - r}" in said for r in range(4))


def words_that_are_cut_off(drawn: dict[Path, bytes]) -> list[str]:
    """Texts of the SVG that begin or, at half an em a letter, end outside of its viewBox."""
    (picture,) = drawn.values()
    root = ElementTree.fromstring(picture)
    _, _, wide, high = map(float, root.get("viewBox").split())
    found = []
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        style = text.get("style")
        at = re.search(r"translate\(([\d.-]+) ([\d.-]+)\)", text.get("transform", ""))
        x, y = map(float, at.groups() if at else (text.get("x"), text.get("y")))
        length = 0.5 * float(re.search(r"([\d.]+)px", style)[1]) * len(text.text)
        begins_at_x = "anchor" not in style and "rotate" not in text.get("transform", "")
        if not 0 <= x <= wide - length * begins_at_x or not 0 <= y <= high:
            found.append(text.text)
    return found


@needs_matplotlib
@pytest.mark.parametrize("width", [2.0, 3.4, 7.0])
def test_no_word_of_a_legend_is_cut_off(width):
    """A legend of more than four kinds was one row that left the picture, and one of many ranks its bottom."""
    plain, costs = build("1f1b", 4, 8), Costs(s=0.5, t=0.25, o=0.5, l=0.5)
    files = Files(svg="a.svg", width=width)
    for table in (with_offload(plain, costs), with_vocabulary(plain, costs)):
        drawn = draw_schedule(table, files, costs)
        assert words_that_are_cut_off(drawn) == []
    uneven = Costs(mem_b=tuple(1.2345 + n for n in range(16)), f=(1.0,) * 16, b=(1.0,) * 16, w=(1.0,) * 16)
    assert words_that_are_cut_off(draw_memory(build("1f1b", 16, 16), files, uneven, memory=12345.0)) == []


def test_a_figure_that_nothing_can_draw_is_refused_with_the_line_that_helps(monkeypatch):
    with pytest.raises(ScheduleError, match=r"--width 0.5: a figure is 2 to 40 inches wide, such as 3.4"):
        Files(svg="a.svg", width=0.5).check()
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    Files().check()
    with pytest.raises(ScheduleError, match="--pdf needs matplotlib, which is not installed: pip install matplotlib"):
        Files(pdf="a.pdf").check()
