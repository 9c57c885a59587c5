"""A schedule as an SVG picture: one row of boxes per rank, the activation it holds below, on one time axis.

The colours are chosen here for every picture, on paper and in the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import Kind, Lane
from megapipe.schedule.passes import Placement, Schedule, Step
from megapipe.schedule.simulate import Timeline, simulate
from megapipe.schedule.views.lanes import ARITHMETIC, LINK, communicates, stretches

COLOURS = {kind: kind.traits.colour for kind in Kind}
"""Colours of the first chunk, apart for common kinds of colour blindness: any two differ in lightness or in blue."""
MEANING = {kind: kind.traits.meaning for kind in Kind}

_Names = dict[tuple[Kind, int], str]
"""The style class of each kind and stage."""

_LEFT, _RIGHT, _TOP = 56, 76, 56
_ROW, _GAP, _CURVE, _CURVE_GAP = 24, 4, 24, 7
_LANE, _LANE_GAP = 7, 2
_STYLE = (
    "text{font:11px sans-serif;fill:#222}.n text{font-size:10px;text-anchor:middle}.h{font-weight:bold}"
    ".r{text-anchor:end}.m{text-anchor:middle}.idle{fill:#e4e4e4}.pair{fill:none;stroke:#111;stroke-width:1.2}"
    ".n rect{stroke:#fff;stroke-width:.6}.n .pair{stroke:#111;stroke-width:1.2}"
    ".axis{stroke:#888;fill:none}.held{fill:#8c7bb5;fill-opacity:.45;stroke:#5b4a8a}"
    ".limit{stroke:#c2185b;stroke-dasharray:5 3}"
)


def tracks(schedule: Schedule) -> list[tuple[int, Lane]]:
    """The lines of a picture: each rank's compute lane, and below it those of its other lanes that the table uses."""
    used = [lane for lane in Lane if lane is Lane.COMPUTE or any(kind.traits.lane is lane for kind in schedule.kinds)]
    return [(rank, lane) for rank in range(len(schedule.ranks)) for lane in used]


def on_track(schedule: Schedule, rank: int, lane: Lane) -> list[Step]:
    """Steps that run on one lane of a rank, in order."""
    return [step for step in schedule.ranks[rank] if step[0].kind.traits.lane is lane]


def chunks(placement: Placement) -> list[int]:
    """The chunk of its rank that each stage is. In DualPipe the chunk is the direction."""
    return [placement.stages_on(rank).index(stage) for stage, rank in enumerate(placement.rank_of)]


def shades(placement: Placement) -> dict[tuple[Kind, int], str]:
    """The colour #rrggbb of each kind and stage: by kind, lighter with each further chunk of the rank."""
    own = chunks(placement)
    white = [0.6 * chunk / max(1, *own) for chunk in own]
    parts = {kind: [int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5)] for kind in Kind}
    return {
        (kind, stage): "#" + "".join(f"{round(part + (255 - part) * white[stage]):02x}" for part in parts[kind])
        for kind in Kind
        for stage in range(placement.num_stages)
    }


def lighter(placement: Placement) -> str:
    """Return what lighter colours stand for, or nothing where a rank has one chunk."""
    if placement.num_stages == len(set(placement.rank_of)):
        return ""
    return "lighter: second direction" if placement.num_chains > 1 else "lighter: later chunk"


def is_dark(colour: str) -> bool:
    """Does #rrggbb want white letters? Rec. 601 luma."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def short(value: float) -> str:
    """A number as people write it: five digits, no trailing zeros, never an exponent from rounding."""
    # A sum is a hair off what others of the same number are, and halves would be rounded both ways.
    exact = float(f"{value:.12g}")
    return f"{exact:.0f}" if abs(exact) >= 1e5 else f"{exact:.5g}"


def to_svg(schedule: Schedule, costs: Costs = UNIT, memory: float | None = None) -> str:
    """Draw a schedule.

    Boxes are passes, grey is bubble; an overlapped pair is one box split in two. Where costs say that passes have
    communication each row has two lanes below, of its passes' arithmetic and of their communication, which in a pair
    lie beside each other. Under the rows, the activation each rank holds over time with its peak and, if given, the
    limit `memory` (in the unit of costs.mem_b).

    Returns: an XML document without scripts or fonts of its own.
    Raises: ScheduleError if the schedule cannot proceed.
    """
    time = simulate(schedule, costs)
    plot = _plot_width(time)
    ranks = len(schedule.ranks)
    lanes = (ARITHMETIC, LINK) if communicates(costs) else ()
    rows_end = _TOP + len(tracks(schedule)) * (_ROW + _GAP) + ranks * len(lanes) * (_LANE + _LANE_GAP)
    curves_top = rows_end + 44
    height = curves_top + ranks * (_CURVE + _CURVE_GAP) + 8
    width = _LEFT + plot + _RIGHT
    scale = plot / time.makespan if time.makespan else 0.0
    used = schedule.kinds | {Kind.F, Kind.B, Kind.W, Kind.BW}
    fill = {key: colour for key, colour in shades(schedule.placement).items() if key[0] in used}
    classes = {colour: f"c{i}" for i, colour in enumerate(dict.fromkeys(fill.values()))}
    names = {key: classes[colour] for key, colour in fill.items()}
    style = (
        _STYLE
        + ".s text{font-size:8px}" * bool(lanes)
        + "".join(
            f".{name}{{fill:{colour}}}" + (f".n .{name}+text{{fill:#fff}}" if is_dark(colour) else "")
            for colour, name in classes.items()
        )
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{style}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_heading(schedule, time, memory),
        *_legend(schedule, names, memory),
        *_rows(schedule, time, names, scale, plot, dict.fromkeys(lanes, costs)),
        *_axis(time, scale, plot, rows_end),
        *_curves(time, memory, scale, plot, curves_top),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _plot_width(time: Timeline) -> int:
    """Pixels: enough for a number in the shortest box, within what a screen can show."""
    lengths = [time.end[item] - time.start[item] for item in time.start]
    shortest = min((length for length in lengths if length > 0), default=1.0)
    return round(min(max(720.0, 13 * time.makespan / shortest), 6000.0))


def _heading(schedule: Schedule, time: Timeline, memory: float | None) -> Iterator[str]:
    limit = "" if memory is None else f" of {short(memory)}"
    facts = (
        f"{len(schedule.ranks)} ranks, {schedule.num_microbatches} microbatches: makespan {short(time.makespan)}, "
        f"bubble {short(time.bubble)}, peak activation {short(max(time.peak))}{limit}"
    )
    yield f'<text x="{_LEFT}" y="18"><tspan class="h">{escape(schedule.name)}</tspan>  {facts}</text>'


def _legend(schedule: Schedule, names: _Names, memory: float | None) -> Iterator[str]:
    """Swatches of the kinds this schedule has, one box for each of a rank's chunks."""
    place = schedule.placement
    own = place.stages_on(0)
    kinds = schedule.kinds
    x = float(_LEFT)
    for kind in (kind for kind in Kind if kind in kinds):
        for stage in own:
            name = names[kind, stage]
            yield f'<rect class="{name}" x="{x:g}" y="30" width="12" height="12"/>'
            x += 13
        text = f"{kind.value} {MEANING[kind]}"
        yield f'<text x="{x + 4:g}" y="40">{text}</text>'
        x += 20 + 5.6 * len(text)
    yield f'<rect class="idle" x="{x:g}" y="30" width="12" height="12"/><text x="{x + 16:g}" y="40">bubble</text>'
    x += 66
    if text := lighter(place):
        yield f'<text x="{x:g}" y="40">{text}</text>'
        x += 14 + 5.6 * len(text)
    if memory is not None:
        yield f'<path class="limit" d="M{x:g} 36h18"/><text x="{x + 22:g}" y="40">memory limit</text>'


def _rows(
    schedule: Schedule, time: Timeline, names: _Names, scale: float, plot: int, lanes: Mapping[str, Costs]
) -> Iterator[str]:
    y = _TOP
    for rank, lane in tracks(schedule):
        computes = lane is Lane.COMPUTE
        label = f"rank {rank}" if computes else lane.value
        yield f'<g transform="translate({_LEFT} {y})"><text class="r" x="-6" y="16">{label}</text>'
        if computes:
            yield f'<text x="{plot + 6}" y="16">idle {short(time.idle[rank])}</text>'
        yield f'<rect class="idle" width="{plot}" height="{_ROW}"/><g class="n">'
        for step in on_track(schedule, rank, lane):
            x, end = time.start[step[0]] * scale, time.end[step[0]] * scale
            width = max(end - x, 1.5)  # of what takes no time too
            yield from _box(step, x, width, [names[item.kind, item.stage] for item in step])
        yield "</g></g>"
        y += _ROW + _GAP
        for part, costs in lanes.items() if computes else ():
            yield f'<g class="s" transform="translate({_LEFT} {y})"><text class="r" x="-6" y="{_LANE}">{part}</text>'
            yield f'<rect class="idle" width="{plot}" height="{_LANE}"/>'
            for item, at, start, end in stretches(schedule, costs, time, rank):
                if at == part:
                    box = f'<rect class="{names[item.kind, item.stage]}" x="{_px(start * scale)}" height="{_LANE}"'
                    yield f'{box} width="{_px((end - start) * scale)}"><title>{item}</title></rect>'
            yield "</g>"
            y += _LANE + _LANE_GAP


def _box(step: Step, x: float, width: float, names: list[str]) -> Iterator[str]:
    """One step; a pair is split across its height, the forward above. A number that does not fit becomes a tooltip."""
    height = _ROW // len(step)
    for i, (item, name) in enumerate(zip(step, names, strict=True)):
        y, label = i * height, item.of
        top = f' y="{y}"' if y else ""
        box = f'<rect class="{name}" x="{_px(x)}"{top} width="{_px(width)}" height="{height}"'
        if width >= 6.2 * len(label) + 1:
            yield f'{box}/><text x="{_px(x + width / 2)}" y="{y + height // 2 + 4}">{label}</text>'
        else:
            yield f"{box}><title>{item}</title></rect>"
    if len(step) > 1:
        yield f'<rect class="pair" x="{_px(x)}" width="{_px(width)}" height="{_ROW}"/>'


def _axis(time: Timeline, scale: float, plot: int, y: int) -> Iterator[str]:
    step = _tick(time.makespan * 60 / plot)
    yield f'<g transform="translate({_LEFT} {y})"><path class="axis" d="M0 4H{plot}"/>'
    at = 0.0
    while step and at <= time.makespan * (1 + 1e-9):
        x = _px(at * scale)
        yield f'<path class="axis" d="M{x} 4v4"/><text class="m" x="{x}" y="19">{short(at)}</text>'
        at += step
    yield '<text class="r" x="-6" y="19">time</text></g>'


def _tick(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... at or above `least`."""
    if least <= 0:
        return 0.0
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _curves(time: Timeline, memory: float | None, scale: float, plot: int, top: int) -> Iterator[str]:
    """The activation of each rank, all to one scale."""
    yield f'<text x="{_LEFT}" y="{top - 6}">activation held by each rank, in microbatches of a device share</text>'
    most = max(*time.peak, memory or 0.0) or 1.0
    for rank, curve in enumerate(time.curves):
        y = top + rank * (_CURVE + _CURVE_GAP)
        path = [f"M0 {_CURVE}"]
        for at, held in dict(curve).items():  # the last value of an instant: B frees what the next F takes
            path.append(f"H{_px(at * scale)}V{_px(_CURVE - held / most * _CURVE)}")
        path.append(f"H{plot}V{_CURVE}z")
        yield f'<g transform="translate({_LEFT} {y})"><text class="r" x="-6" y="18">rank {rank}</text>'
        yield f'<path class="axis" d="M0 {_CURVE}H{plot}"/><path class="held" d="{"".join(path)}"/>'
        if memory is not None:
            yield f'<path class="limit" d="M0 {_px(_CURVE - memory / most * _CURVE)}H{plot}"/>'
        yield f'<text x="{plot + 6}" y="18">peak {short(time.peak[rank])}</text></g>'


def _px(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
