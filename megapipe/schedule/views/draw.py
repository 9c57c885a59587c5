"""A schedule as an SVG picture: a row of boxes for each rank, and its activation over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import LAYERS, Kind, Lane
from megapipe.schedule.passes import Schedule
from megapipe.schedule.simulate import Timeline
from megapipe.schedule.views.scene import Box, Scene, Track, is_dark, lighter, scene_of, short

_Names = dict[tuple[Kind, int], str]
"""The style class of each kind and stage."""

_LEFT = 56
_RIGHT = 76
_TOP = 56
_ROW = 24
_GAP = 4
_CURVE = 24
_CURVE_GAP = 7
_LANE = 7
_LANE_GAP = 2
_STYLE = (
    "text{font:11px sans-serif;fill:#222}.n text{font-size:10px;text-anchor:middle}"
    ".h{font-weight:bold}"
    ".r{text-anchor:end}.m{text-anchor:middle}.idle{fill:#e4e4e4}"
    ".pair{fill:none;stroke:#111;stroke-width:1.2}"
    ".n rect{stroke:#fff;stroke-width:.6}.n .pair{stroke:#111;stroke-width:1.2}"
    ".axis{stroke:#888;fill:none}.held{fill:#8c7bb5;fill-opacity:.45;stroke:#5b4a8a}"
    ".limit{stroke:#c2185b;stroke-dasharray:5 3}"
)


def to_svg(schedule: Schedule, costs: Costs = UNIT, memory: float | None = None) -> str:
    """Return a schedule as an SVG document without scripts or fonts of its own.

    Boxes are passes, grey is bubble, and an overlapped pair is one box split in two. If passes
    contain communication, two more lines for each rank show their arithmetic and their
    communication. Below the rows is the activation of each rank over time, with its peak.

    Args:
        memory: a limit on a rank's activation to draw, in the unit of costs.mem_b; None for none.
    Raises: ScheduleError if the schedule cannot proceed.
    """
    scene = scene_of(schedule, costs)
    time = scene.time
    plot = _plot_width(scene.time)
    ranks = len(schedule.ranks)
    # 44 pixels for the axis of time and the caption of the curves.
    curves_top = _TOP + sum(sum(_size(track)) for track in scene.tracks) + 44
    height = curves_top + ranks * (_CURVE + _CURVE_GAP) + 8
    width = _LEFT + plot + _RIGHT
    scale = 0.0
    if time.makespan:
        scale = plot / time.makespan
    used = schedule.kinds.union(LAYERS)
    fill = {key: colour for key, colour in scene.fill.items() if key[0] in used}
    # A class for each colour, because a large table has tens of thousands of boxes. A box and its
    # text are then as short as they can be.
    classes = {colour: f"c{i}" for i, colour in enumerate(dict.fromkeys(fill.values()))}
    names = {key: classes[colour] for key, colour in fill.items()}
    style = _STYLE
    if any(track.within for track in scene.tracks):
        style += ".s text{font-size:8px}"
    for colour, name in classes.items():
        style += f".{name}{{fill:{colour}}}"
        if is_dark(colour):
            style += f".n .{name}+text{{fill:#fff}}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f"<style>{style}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_heading(schedule, time, memory),
        *_legend(scene, names, memory),
        *_rows(scene, names, scale, plot),
        *_axis(time, scale, plot, curves_top - 44),
        *_curves(scene, memory, scale, plot, curves_top),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _size(track: Track) -> tuple[int, int]:
    """Return (height of a track, height of the gap below it) in pixels."""
    if track.within:
        return _LANE, _LANE_GAP
    return _ROW, _GAP


def _plot_width(time: Timeline) -> int:
    """Return the width of the plot in pixels, from 720 to 6000, without the margins of the picture.

    Within these limits the shortest box has room for a number. `time` is the timeline to draw.
    """
    lengths = [time.end[item] - time.start[item] for item in time.start]
    # Passes may take no time, such as U under costs that do not name it.
    shortest = min((length for length in lengths if length > 0), default=1.0)
    # 13 pixels are two digits. The number of a narrower box becomes its tooltip, see `_boxes`.
    return round(min(max(720.0, 13 * time.makespan / shortest), 6000.0))


def _heading(schedule: Schedule, time: Timeline, memory: float | None) -> Iterator[str]:
    limit = ""
    if memory is not None:
        limit = f" of {short(memory)}"
    facts = (
        f"{len(schedule.ranks)} ranks, {schedule.num_microbatches} microbatches: "
        f"makespan {short(time.makespan)}, "
        f"bubble {short(time.bubble)}, peak activation {short(max(time.peak))}{limit}"
    )
    name = f'<tspan class="h">{escape(schedule.name)}</tspan>'
    yield f'<text x="{_LEFT}" y="18">{name}  {facts}</text>'


def _legend(scene: Scene, names: _Names, memory: float | None) -> Iterator[str]:
    """Yield the SVG of the legend: each kind of pass, with a coloured box for each stage of a rank.

    Args:
        names: {(kind, stage): name of the style class}.
        scene: the schedule with its simulated times.
        memory: the memory limit in the legend; None for none.
    """
    place = scene.schedule.placement
    own = place.stages_on(0)
    x = float(_LEFT)
    for kind in scene.kinds:
        for stage in own:
            name = names[kind, stage]
            yield f'<rect class="{name}" x="{x:g}" y="30" width="12" height="12"/>'
            x += 13
        text = f"{kind.value} {kind.traits.meaning}"
        yield f'<text x="{x + 4:g}" y="40">{text}</text>'
        # SVG cannot measure text. 5.6 pixels are a mean letter of 11 pixel sans-serif.
        x += 20 + 5.6 * len(text)
    idle = f'<rect class="idle" x="{x:g}" y="30" width="12" height="12"/>'
    yield f'{idle}<text x="{x + 16:g}" y="40">bubble</text>'
    x += 66
    if text := lighter(place):
        yield f'<text x="{x:g}" y="40">{text}</text>'
        x += 14 + 5.6 * len(text)
    if memory is not None:
        line = f'<path class="limit" d="M{x:g} 36h18"/>'
        yield f'{line}<text x="{x + 22:g}" y="40">memory limit</text>'


def _rows(scene: Scene, names: _Names, scale: float, plot: int) -> Iterator[str]:
    y = _TOP
    for track in scene.tracks:
        height, gap = _size(track)
        style = ""
        middle = 16
        boxes = _boxes
        opened = '<g class="n">'
        closed = "</g></g>"
        # Parts of passes have no numbers, so they need no group in the style of numbers.
        if track.within:
            style = ' class="s"'
            middle = _LANE
            boxes = _part
            opened = ""
            closed = "</g>"
        label = f'<text class="r" x="-6" y="{middle}">{track.name}</text>'
        yield f'<g{style} transform="translate({_LEFT} {y})">{label}'
        if track.stream == Lane.COMPUTE.value:
            yield f'<text x="{plot + 6}" y="16">idle {short(scene.time.idle[track.rank])}</text>'
        # The row is grey and boxes cover it, so what stays grey is bubble.
        yield f'<rect class="idle" width="{plot}" height="{height}"/>{opened}'
        for step in track.steps:
            yield from boxes(step, scale, names)
        yield closed
        y += height + gap


def _part(step: Sequence[Box], scale: float, names: _Names) -> Iterator[str]:
    """Yield SVG boxes for times within a pass in which a rank computes, or communicates.

    Args:
        step: such times, each with its pass, start and end.
        scale: pixels per unit of time.
        names: {(kind, stage): name of the style class}.
    """
    for box in step:
        rect = f'<rect class="{_name(box, names)}" x="{_px(box.start * scale)}" height="{_LANE}"'
        width = _px((box.end - box.start) * scale)
        yield f'{rect} width="{width}"><title>{box.item}</title></rect>'


def _boxes(step: Sequence[Box], scale: float, names: _Names) -> Iterator[str]:
    """Yield SVG boxes for a step. Of two overlapped passes, the forward is above the backward.

    A box has the number of the microbatch, or a tooltip where the number does not fit.

    Args:
        step: the box of a pass, or both boxes of an overlapped pair.
        scale: pixels per unit of time.
        names: {(kind, stage): name of the style class}.
    """
    height = _ROW // len(step)
    x = step[0].start * scale
    width = max(step[0].end * scale - x, 1.5)  # a pass of no duration is drawn too
    for i, box in enumerate(step):
        y = i * height
        label = box.item.of
        top = ""
        if y:
            top = f' y="{y}"'
        place = f'x="{_px(x)}"{top} width="{_px(width)}" height="{height}"'
        rect = f'<rect class="{_name(box, names)}" {place}'
        # A digit of 10 pixels is 6.2 wide in the widest usual sans-serif.
        if width >= 6.2 * len(label) + 1:
            yield f'{rect}/><text x="{_px(x + width / 2)}" y="{y + height // 2 + 4}">{label}</text>'
        else:
            yield f"{rect}><title>{box.item}</title></rect>"
    # A frame around both: their boxes alone look like two passes of two microbatches.
    if len(step) > 1:
        yield f'<rect class="pair" x="{_px(x)}" width="{_px(width)}" height="{_ROW}"/>'


def _name(box: Box, names: _Names) -> str:
    return names[box.item.kind, box.item.stage]


def _axis(time: Timeline, scale: float, plot: int, y: int) -> Iterator[str]:
    # At least 60 pixels between ticks, so that their numbers do not touch.
    step = _tick(time.makespan * 60 / plot)
    yield f'<g transform="translate({_LEFT} {y})"><path class="axis" d="M0 4H{plot}"/>'
    at = 0.0
    while step and at <= time.makespan * (1 + 1e-9):
        x = _px(at * scale)
        yield f'<path class="axis" d="M{x} 4v4"/><text class="m" x="{x}" y="19">{short(at)}</text>'
        at += step
    yield '<text class="r" x="-6" y="19">time</text></g>'


def _tick(least: float) -> float:
    """Return the step between ticks: the first of ..., 0.5, 1, 2, 5, 10, ... not below `least`.

    The step is 0 if `least` is not above 0.
    """
    if least <= 0:
        return 0.0
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _curves(scene: Scene, memory: float | None, scale: float, plot: int, top: int) -> Iterator[str]:
    """Yield SVG curves of each rank's activation over time, with one vertical scale for all.

    Args:
        scene: the schedule with its simulated times.
        memory: a limit on activation to draw; None for none.
        scale: pixels per unit of time.
        plot, top: width of the curves and y of the first one, in pixels.
    """
    caption = "activation held by each rank, in microbatches of a device share"
    yield f'<text x="{_LEFT}" y="{top - 6}">{caption}</text>'
    # One scale for all ranks and the limit, so that heights can be compared.
    most = max(*scene.time.peak, memory or 0.0) or 1.0
    for rank, curve in enumerate(scene.curves):
        y = top + rank * (_CURVE + _CURVE_GAP)
        # A step curve: H moves to the time of a change, V to the memory held from then on.
        path = [f"M0 {_CURVE}"]
        for at, held in curve.items():
            path.append(f"H{_px(at * scale)}V{_px(_CURVE - held / most * _CURVE)}")
        path.append(f"H{plot}V{_CURVE}z")
        label = f'<text class="r" x="-6" y="18">rank {rank}</text>'
        yield f'<g transform="translate({_LEFT} {y})">{label}'
        yield f'<path class="axis" d="M0 {_CURVE}H{plot}"/><path class="held" d="{"".join(path)}"/>'
        if memory is not None:
            yield f'<path class="limit" d="M0 {_px(_CURVE - memory / most * _CURVE)}H{plot}"/>'
        yield f'<text x="{plot + 6}" y="18">peak {short(scene.time.peak[rank])}</text></g>'


def _px(value: float) -> str:
    """Return a length in pixels as text, rounded to a tenth and as short as possible."""
    return f"{value:.1f}".rstrip("0").rstrip(".")
