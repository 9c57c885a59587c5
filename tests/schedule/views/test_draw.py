"""Pictures show what the clock says, no more and no less."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest

from megapipe.schedule import Costs, Kind, Schedule, build, simulate
from megapipe.schedule.costs import UNIT
from megapipe.schedule.families.sharding.sharded import with_sharded_weights
from megapipe.schedule.families.step.asked import StepPasses
from megapipe.schedule.passes import repeated
from megapipe.schedule.views.draw import to_svg
from megapipe.schedule.views.perfetto import to_perfetto
from megapipe.schedule.views.scene import COLOURS, shades, short
from megapipe.schedule.views.terminal import to_terminal

SVG = "{http://www.w3.org/2000/svg}"
COSTS = Costs(10, 11, 8, comm=1)
DRAWN = ["gpipe", "1f1b", "interleaved", "zb-h2", "zb-v", "v-min", "dualpipe", "dualpipe-v"]


def passes(schedule: Schedule) -> list[str]:
    return sorted(str(item) for row in schedule.ranks for step in row for item in step)


def rows(picture: str) -> list[ElementTree.Element]:
    """The group of boxes of each rank."""
    return [g for g in ElementTree.fromstring(picture).iter(f"{SVG}g") if g.get("class") == "n"]


def boxes(row: ElementTree.Element) -> list[ElementTree.Element]:
    return [box for box in row.iter(f"{SVG}rect") if box.get("class") != "pair"]


@pytest.mark.parametrize("name", DRAWN)
def test_every_pass_is_one_box_as_long_as_it_runs(name):
    schedule = build(name, 4, 8)
    time = simulate(schedule, COSTS)
    picture = to_svg(schedule, COSTS)
    plot = float(next(ElementTree.fromstring(picture).iter(f"{SVG}rect")).get("width")) - 56 - 76
    for row, steps in zip(rows(picture), schedule.ranks, strict=True):
        drawn = [(float(b.get("x")), float(b.get("width")), float(b.get("height"))) for b in boxes(row)]
        clock = [(time.start[x], time.end[x] - time.start[x], 24 / len(step)) for step in steps for x in step]
        assert len(drawn) == len(clock)
        for (x, width, height), (start, length, share) in zip(drawn, clock, strict=True):
            assert x == pytest.approx(start * plot / time.makespan, abs=0.051)
            assert width == pytest.approx(length * plot / time.makespan, abs=0.051)
            assert height == share


@pytest.mark.parametrize("microbatches", [8, 120])
def test_every_box_has_its_number_inside_or_its_name_as_tooltip(microbatches):
    schedule = build("zb-h1", 4, microbatches)
    row = rows(to_svg(schedule))[0]
    numbers = [text.text for text in row.iter(f"{SVG}text")]
    names = [title.text for title in row.iter(f"{SVG}title")]
    own = [item for step in schedule.ranks[0] for item in step]
    assert len(numbers) + len(names) == len(own)
    assert Counter(names) <= Counter(map(str, own))
    assert Counter(numbers) <= Counter(str(item.microbatch) for item in own)


def test_a_pair_is_one_outline_around_two_halves():
    schedule = build("dualpipe", 4, 8)
    picture = to_svg(schedule, Costs(fb=2.5))
    for row, steps in zip(rows(picture), schedule.ranks, strict=True):
        outlines = [box for box in row.iter(f"{SVG}rect") if box.get("class") == "pair"]
        assert len(outlines) == sum(len(step) == 2 for step in steps) > 0


def test_the_curve_reaches_the_peak_and_the_limit_lies_above_it():
    picture = to_svg(build("1f1b", 4, 8), memory=5)
    paths = ElementTree.fromstring(picture).iter(f"{SVG}path")
    by_class: dict[str, list[str]] = {}
    for path in paths:
        by_class.setdefault(path.get("class"), []).append(path.get("d"))
    # 24 pixels stand for the limit of 5; 1F1B's rank r peaks at 4 - r.
    tops = [min(float(y) for y in re.findall(r"V([\d.]+)", path)) for path in by_class["held"]]
    assert tops == pytest.approx([24 * (1 - peak / 5) for peak in (4, 3, 2, 1)], abs=0.051)
    assert [path[:4] for path in by_class["limit"][1:]] == ["M0 0"] * 4


def test_a_picture_needs_nothing_from_outside_and_survives_any_name():
    schedule = replace(build("1f1b", 2, 2), name='my <"schedule"> & more')
    picture = to_svg(schedule)
    assert not re.search(r"<script|href|url\(|@import|<image", picture)
    assert any('my <"schedule"> & more' in text for text in ElementTree.fromstring(picture).itertext())


@pytest.mark.parametrize("draw", [to_svg, to_terminal, to_perfetto])
def test_passes_that_cost_nothing_can_be_drawn(draw):
    assert draw(build("zb-h1", 2, 2), Costs(0, 0, 0))
    assert draw(build("1f1b", 1, 1))


# Machado, Oliveira, Fernandes 2009, table 1, severity 1: what is left of linear RGB.
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def lab(colour: str, blindness: str) -> tuple[float, float, float]:
    """CIE 1976 L*a*b*, D65, as seen with a colour blindness."""
    srgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    rgb = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in srgb]
    rgb = [min(1, max(0, sum(a * x for a, x in zip(row, rgb, strict=True)))) for row in BLINDNESS[blindness]]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(a * x for a, x in zip(row, rgb, strict=True)) for row in to_xyz]
    f = [t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (xyz[0] / 0.9505, xyz[1], xyz[2] / 1.089)]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def difference(a: str, b: str, blindness: str = "none") -> float:
    """CIE 1976; 2.3 is just noticeable."""
    return math.dist(lab(a, blindness), lab(b, blindness))


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colours_of_two_kinds_differ_for_every_eye(blindness):
    for a, b in combinations(set(COLOURS.values()), 2):  # those of one collective are one colour
        assert difference(a, b, blindness) > 20, (a, b)


def test_the_second_chunk_and_the_second_direction_are_lighter():
    for name in ("zb-v", "dualpipe"):
        fill = shades(build(name, 4, 8).placement)
        for kind in Kind:
            assert lab(fill[kind, 4], "none")[0] > lab(fill[kind, 3], "none")[0]
            assert difference(fill[kind, 4], fill[kind, 3]) > 20


def test_the_terminal_draws_1f1b_as_the_textbook_does():
    assert to_terminal(build("1f1b", 2, 3), width=45).split("\n") == [
        "rank 0 |F0 F1 ......BW0   F2 BW1   ...BW2   |",
        "rank 1 |...F0 BW0   F1 BW1   F2 BW2   ......|",
        "F forward; BW both gradients; . idle",
    ]


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("width", [20, 61, 100, 300])
def test_the_terminal_keeps_to_its_width(name, width):
    schedule = build(name, 4, 24)
    plain = to_terminal(schedule, COSTS, width=width).split("\n")[:4]
    assert max(map(len, plain)) <= width
    assert len(set(map(len, plain))) == 1
    assert all(line.isascii() and line.isprintable() for line in plain)
    coloured = to_terminal(schedule, COSTS, width=width, colour=True).split("\n")[:4]
    assert [len(re.sub(r"\033\[[\d;]*m", "", line)) for line in coloured] == [len(line) for line in plain]


def test_the_terminal_names_pairs_and_tells_chunks_apart():
    text = to_terminal(build("dualpipe", 4, 8), width=240)
    assert "F2 &bw4" in re.sub(r" +&", " &", text)
    assert "lower case: the other direction" in text


@pytest.mark.parametrize("name", DRAWN)
def test_a_trace_has_every_pass_message_and_peak(name):
    schedule = build(name, 4, 8)
    time = simulate(schedule, COSTS)
    events = json.loads(to_perfetto(schedule, COSTS))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert sorted(event["args"]["pass"] for event in slices) == passes(schedule)
    assert {event["tid"] for event in slices} == set(range(4))
    last = max(event["ts"] + event["dur"] for event in slices)
    assert last == pytest.approx(1000 * time.makespan)
    for rank in range(4):
        held = [e["args"]["held"] for e in events if e["ph"] == "C" and e["name"] == f"activation of rank {rank}"]
        assert max(held) == time.peak[rank]
        assert held[-1] == pytest.approx(0)


def test_an_arrow_leaves_inside_its_pass_and_lands_after_the_latency():
    schedule = build("zb-v", 4, 8)
    events = json.loads(to_perfetto(schedule, COSTS))["traceEvents"]
    leaves = {event["id"]: event for event in events if event["ph"] == "s"}
    lands = {event["id"]: event for event in events if event["ph"] == "f"}
    assert leaves.keys() == lands.keys()
    assert len(leaves) == sum(simulate(schedule, COSTS).sent)
    slices = [event for event in events if event["ph"] == "X"]
    for number, event in leaves.items():
        assert any(s["tid"] == event["tid"] and s["ts"] <= event["ts"] < s["ts"] + s["dur"] for s in slices), (
            "an arrow from nowhere"
        )
        assert lands[number]["ts"] >= event["ts"] + 1000 * COSTS.comm
        assert any(s["tid"] == lands[number]["tid"] and s["ts"] == lands[number]["ts"] for s in slices)


def test_two_steps_without_a_barrier_are_a_parallelogram_with_the_rest_of_the_step_on_its_lanes():
    """Each rank works from its first pass to its last, a column later than the rank before; G is beside, U and V in."""
    table = repeated(StepPasses.whole(UNIT, barrier=False).around(build("zb-h2", 4, 8), UNIT), 2)
    lines = [line.split("|")[1] for line in to_terminal(table).splitlines()[:8]]
    assert [row.strip(".").count(".") for row in lines[::2]] == [0] * 4
    assert [len(row) - len(row.lstrip(".")) for row in lines[::2]] == [0, 1, 2, 3]
    assert [len(row) - len(row.rstrip(".")) for row in lines[::2]] == [3, 2, 1, 0]
    assert [row.count("G") for row in lines[1::2]] == [2] * 4
    wide = to_terminal(table, width=220).splitlines()[0]
    assert wide.index("V") < wide.index("B0") < wide.index("U") < wide.index("F8") < wide.rindex("V")


@pytest.mark.parametrize("width", [100, 200])
def test_gathers_and_sums_shorter_than_a_column_are_seen(width):
    """Their lanes were dots at a tenth of a pass."""
    costs = Costs(a=0.1, g=0.1)
    made = with_sharded_weights(build("1f1b", 4, 8), costs)
    lanes = [line for line in to_terminal(made, costs, width=width).splitlines() if " dp |" in line]
    assert [("A" in line, "R" in line) for line in lanes] == [(True, True)] * 4


@pytest.mark.parametrize("number", [49.3125, 24.5625, 24.1875, 297.0])
def test_a_number_that_a_sum_missed_by_a_hair_is_written_as_the_number(number):
    """One table of a comparison had 49.312 and 49.313 for the same time."""
    said = {short(number * (1 + hair)) for hair in (-1e-15, 0, 1e-15, 4e-15)}
    assert len(said) == 1
    assert float(said.pop()) == pytest.approx(number, rel=3e-5)  # five digits
