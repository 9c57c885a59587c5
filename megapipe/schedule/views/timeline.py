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
    """Return the files with the figure of a simulated schedule."""
    scene = scene_of(schedule, costs)
    time = scene.time
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
    """Return the files with a figure: a panel for each pipeline, all on one time axis."""
    height = sum(len(lines) for lines, _ in figures) * _ROW + 0.45 * len(figures) + 0.25

    def paint(figure: Figure) -> None:
        panels = figure.subplots(len(figures), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (lines, placement) in zip(panels, figures, strict=True):
            _passes(axes, lines, placement, files.width)
        panels[-1].set_xlabel(unit)
        there = {box.item.kind for lines, _ in figures for line in lines for box in line.boxes}
        kinds = [kind for kind in Kind if kind in there]
        colour = shades(figures[0][1])
        for kind in kinds:
            panels[0].barh(
                [0], [0], color=colour[kind, 0], label=f"{kind.value} {kind.traits.meaning}"
            )
        if said := lighter(figures[0][1]):
            panels[0].barh(
                [0], [0], color=colour[kinds[0], figures[0][1].stages_on(0)[-1]], label=said
            )
        has_lanes = any(kind.traits.lane is not Lane.COMPUTE for kind in kinds)
        panels[0].barh(
            [0], [0], color=_IDLE, label="idle: between passes a bubble" if has_lanes else "bubble"
        )
        fitted_legend(figure, panels[0])

    return files.draw(height, about, paint)


def _passes(axes: Axes, lines: Sequence[Track], placement: Placement, width: float) -> None:
    colour = shades(placement)
    ends = max((box.end for line in lines for box in line.boxes), default=1.0) or 1.0
    places = list[float]()
    y = 0.0
    for line in lines:
        y -= 1.0 + 0.35 * (line.apart and bool(places))
        places.append(y + 0.45)
        axes.broken_barh([(0, ends)], (y, 0.9), facecolors=_IDLE)
        of: dict[tuple[float, float, str], list[tuple[float, float]]] = defaultdict(list)
        for n, parts, box in (
            (n, len(step), box) for step in line.steps for n, box in enumerate(step)
        ):
            where = (
                y + 0.9 * (parts - 1 - n) / parts,
                0.9 / parts,
                colour[box.item.kind, box.item.stage],
            )
            of[where].append((box.start, box.end - box.start))
            letters = box.item.of
            inches = (box.end - box.start) / ends * (width - 0.7)
            size = min(4.5, 4.5 * inches / (0.04 * len(letters)))  # size of a letter in points
            if parts == 1 and size >= 3.2:
                ink = "white" if is_dark(where[2]) else "#222"
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
    """Draw the memory that each rank holds over time, all to one scale."""
    scene = scene_of(schedule, costs)
    time = scene.time
    about = (
        f"Activation held by each rank under {schedule.name}: {len(schedule.ranks)} ranks, "
        f"{schedule.num_microbatches} microbatches, most {short(max(time.peak))}"
        f"{'' if memory is None else f' of {short(memory)}'}."
    )

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for rank, at in enumerate(scene.curves):
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
