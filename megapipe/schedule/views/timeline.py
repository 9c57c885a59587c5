"""Figures of passes over time: of a schedule, of a run with its prediction, and of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import Kind, Lane
from megapipe.schedule.passes import Placement, Schedule
from megapipe.schedule.views.figure import Files, fitted_legend
from megapipe.schedule.views.scene import Track, is_dark, lighter, scene_of, shades, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_IDLE = "#e4e4e4"
_ROW = 0.17
"""Inches of a line of passes."""


def draw_schedule(schedule: Schedule, files: Files, costs: Costs = UNIT) -> dict[Path, bytes]:
    """Return {path: content} of files with a figure of a simulated schedule.

    Args:
        files: the files to write.
    """
    scene = scene_of(schedule, costs)
    time = scene.time
    # Arithmetic and communication within passes are too fine for a column of a paper.
    lines = [track for track in scene.tracks if not track.within]
    about = (
        f"{schedule.name} on {len(schedule.ranks)} ranks, "
        f"{schedule.num_microbatches} microbatches: makespan "
        f"{short(time.makespan)}, bubble {short(time.bubble)} "
        f"({time.bubble / (time.period or 1.0):.1%} of the period), "
        f"peak activation {short(max(time.peak))}."
    )
    return draw([(lines, schedule.placement)], files, about, "time, in the unit of the costs")


def draw(
    figures: Sequence[tuple[Sequence[Track], Placement]], files: Files, about: str, unit: str
) -> dict[Path, bytes]:
    """Return {path: content} of files with a figure: a panel for each pipeline over one time axis.

    Args:
        figures: (lines, placement) of each pipeline.
        files: the files to write.
        about: the caption.
        unit: label of the time axis.
    """
    # 0.45 inches of a panel are its margins, 0.25 the axis of time.
    height = sum(len(lines) for lines, _ in figures) * _ROW + 0.45 * len(figures) + 0.25

    def paint(figure: Figure) -> None:
        # One axis of time, so that pipelines can be compared by eye.
        panels = figure.subplots(len(figures), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (lines, placement) in zip(panels, figures, strict=True):
            _passes(axes, lines, placement, files.width)
        panels[-1].set_xlabel(unit)
        # Bars of no length, which only the legend shows.
        there = {box.item.kind for lines, _ in figures for line in lines for box in line.boxes}
        kinds = [kind for kind in Kind if kind in there]
        placement = figures[0][1]
        colour = shades(placement)
        legend = [(colour[kind, 0], f"{kind.value} {kind.traits.meaning}") for kind in kinds]
        if text := lighter(placement):
            last = placement.stages_on(0)[-1]
            legend.append((colour[kinds[0], last], text))
        # Streams of copies and collectives are idle most of the time, which is no bubble.
        idle = "bubble"
        if any(kind.traits.lane is not Lane.COMPUTE for kind in kinds):
            idle = "idle: between passes a bubble"
        legend.append((_IDLE, idle))
        for shade, label in legend:
            panels[0].barh([0], [0], color=shade, label=label)
        fitted_legend(figure, panels[0])

    return files.draw(height, about, paint)


def _passes(axes: Axes, lines: Sequence[Track], placement: Placement, width: float) -> None:
    """Draw the passes of one pipeline as boxes, with a line for each track.

    Args:
        lines: one track for each line of the panel.
        width: width of the figure in inches, which decides whether a number fits a box.
    """
    colour = shades(placement)
    ends = max((box.end for line in lines for box in line.boxes), default=1.0) or 1.0
    places = list[float]()
    y = 0.0
    for line in lines:
        y -= 1.0 + 0.35 * (line.gap and bool(places))
        places.append(y + 0.45)
        axes.broken_barh([(0, ends)], (y, 0.9), facecolors=_IDLE)
        # (bottom, height, colour) -> (start, length) of boxes. matplotlib draws all boxes of one
        # call in a fraction of the time that a call for each takes.
        of: dict[tuple[float, float, str], list[tuple[float, float]]] = defaultdict(list)
        for step in line.steps:
            parts = len(step)
            for n, box in enumerate(step):
                shade = colour[box.item.kind, box.item.stage]
                length = box.end - box.start
                # The passes of a pair are above each other, the forward on top.
                bottom = y + 0.9 * (parts - 1 - n) / parts
                of[bottom, 0.9 / parts, shade].append((box.start, length))
                letters = box.item.of
                inches = length / ends * (width - 0.7)
                size = min(4.5, 4.5 * inches / (0.04 * len(letters)))  # size of a letter in points
                # Below 3.2 points nobody reads a number, and half a line has no room for one.
                if parts > 1 or size < 3.2:
                    continue
                ink = "#222"
                if is_dark(shade):
                    ink = "white"
                middle = (box.start + box.end) / 2
                axes.text(
                    middle, y + 0.43, letters, ha="center", va="center", fontsize=size, color=ink
                )
        for (bottom, height, shade), spans in of.items():
            axes.broken_barh(
                spans, (bottom, height), facecolors=shade, edgecolor="white", linewidth=0.3
            )
    axes.set_yticks(places, [line.name for line in lines])
    axes.tick_params(left=False)
    axes.spines.left.set_visible(False)
    axes.set_xlim(0, ends)


def draw_memory(
    schedule: Schedule, files: Files, costs: Costs = UNIT, memory: float | None = None
) -> dict[Path, bytes]:
    """Return {path: content} of files with a figure: the memory of each rank over time.

    All ranks are drawn to one scale.

    Args:
        files: the files to write.
        memory: a limit to draw, in the unit of the costs; None for no limit.
    """
    scene = scene_of(schedule, costs)
    time = scene.time
    limit = ""
    if memory is not None:
        limit = f" of {short(memory)}"
    about = (
        f"Activation held by each rank under {schedule.name}: {len(schedule.ranks)} ranks, "
        f"{schedule.num_microbatches} microbatches, most {short(max(time.peak))}{limit}."
    )

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for rank, at in enumerate(scene.curves):
            # A rank holds nothing before its first pass and after its last.
            axes.plot(
                [0.0, *at, time.makespan],
                [0.0, *at.values(), 0.0],
                drawstyle="steps-post",
                label=f"rank {rank}, peak {short(time.peak[rank])}",
            )
        if memory is not None:
            axes.axhline(memory, color="#c2185b", linestyle="--", linewidth=0.8, label="limit")
        axes.set(xlim=(0, time.makespan or 1.0), xlabel="time, in the unit of the costs")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("microbatches of 1/p")
        fitted_legend(figure, axes)

    return files.draw(1.7, about, paint)
