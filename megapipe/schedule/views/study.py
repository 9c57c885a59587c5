"""Compare schedules over ranks, microbatches and costs, as a table or a figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from html import escape
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, overload

from megapipe.moved import moved_names
from megapipe.notebook import html_table
from megapipe.schedule.catalogue import SCHEDULES
from megapipe.schedule.core.cuts import Cutting
from megapipe.schedule.costs import SHARES, Costs
from megapipe.schedule.families.family import mean
from megapipe.schedule.passes import Schedule
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.views.compare import Refusal, Row, advise, cells_of, compare, to_table
from megapipe.schedule.views.figure import Files, legend, plain
from megapipe.schedule.views.scene import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = {"microbatches": "microbatches", "ranks": "pipeline ranks", "costs": "F:B:W"}
"""Axes that a study may vary.

The first one with several values is the horizontal axis, the others make panels.
"""
_COLOURS = (
    *(
        "#1f77b4",
        "#ff7f0e",
        "#2ca02c",
        "#d62728",
        "#9467bd",
        "#8c564b",
        "#e377c2",
        "#7f7f7f",
        "#bcbd22",
        "#17becf",
    ),
    *("#08306b", "#a63603", "#00441b", "#67000d", "#3f007d", "#000000", "#b8860b", "#008080"),
)
_MARKS = "osD^vPX"


@dataclass(frozen=True, repr=False)
class Comparison(Sequence[Row | Refusal]):
    """A comparison of all schedules for one number of ranks and microbatches, and one set of costs.

    Printed, also in a notebook, it is a table with advice. Used as a sequence, it has the rows. The
    name of a schedule in brackets gives one row: `found["zb-h1"].makespan`. `measured` is the rows
    of schedules that exist for these numbers.

    Attributes:
        rows: the numbers of each schedule, or the reason why it does not exist.
    """

    ranks: int
    microbatches: int
    costs: Costs
    rows: tuple[Row | Refusal, ...]

    @property
    def measured(self) -> list[Row]:
        """Return the rows of the schedules that exist."""
        return [row for row in self.rows if isinstance(row, Row)]

    @property
    def advice(self) -> list[str]:
        """Return sentences on which schedule to take and why."""
        return advise(self.measured, self.ranks, self.microbatches, self.costs)

    def text(self, *names: str) -> str:
        """Return "p = 8, m = 16" for the field names "ranks" and "microbatches", and so on."""
        said = {
            "ranks": f"p = {self.ranks}",
            "microbatches": f"m = {self.microbatches}",
            "costs": told(self.costs),
        }
        return ", ".join(said[name] for name in names)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, which: str) -> Row: ...

    @overload
    def __getitem__(self, which: int) -> Row | Refusal: ...

    @overload
    def __getitem__(self, which: slice) -> tuple[Row | Refusal, ...]: ...

    def __getitem__(self, which: str | int | slice) -> Row | Refusal | tuple[Row | Refusal, ...]:
        """Return the row of a label or index, or the rows of a slice.

        Raises: KeyError for a label without a row, with the reason for a refused one.
        """
        if not isinstance(which, str):
            return self.rows[which]
        for row in self.rows:
            if row.label == which and isinstance(row, Row):
                return row
            if row.label == which and isinstance(row, Refusal):
                raise KeyError(f"{which}: {row.reason}")
        raise KeyError(f"{which}; there are {', '.join(row.label for row in self.rows)}")

    def __repr__(self) -> str:
        return "\n".join([to_table(self.rows), "", *self.advice])

    def _repr_html_(self) -> str:
        table = html_table(cells_of(self.rows), self.text("ranks", "microbatches", "costs"))
        refused = [f"{row.label}: {row.reason}" for row in self.rows if isinstance(row, Refusal)]
        return "\n".join([table, *(f"<p>{escape(line)}</p>" for line in (*refused, *self.advice))])


if not TYPE_CHECKING:  # a type checker would take any misspelled name for a name of this module
    __getattr__ = moved_names(__name__, {"Point": "schedule.views.study:Comparison"})


def told(costs: Costs) -> str:
    """Return costs as a short text. If stages differ, times are means over the stages."""
    values = costs.f, costs.b, costs.w, costs.comm
    f, b, w, message = map(mean, values)
    differ = any(isinstance(x, tuple) for x in values)
    beside = {"message": message, "overhead": costs.overhead}
    # A dict as an ordered set: --comm-share gives all three passes one share, which is said once.
    links = dict.fromkeys(getattr(costs, name) for name in SHARES)
    parts = ["mean " * differ + f"F:B:W = {short(f)}:{short(b)}:{short(w)}"]
    parts += [f"{name} {short(x)}" for name, x in beside.items() if x]
    parts += [f"communication {short(x)}" for x in links if x and not isinstance(x, tuple)]
    return " ".join(parts)


def study(
    ranks: Sequence[int],
    microbatches: Sequence[int],
    costs: Sequence[Costs],
    memory: float | None,
    names: Sequence[str | Schedule | Recipe],
    effort: float,
    progress: Callable[[float, str], None],
    slices: Cutting | None = None,
    parts: Recipe | None = None,
) -> list[Comparison]:
    """Return the result of `compare` for every combination of ranks, microbatches and costs.

    Args:
        memory: limit on a rank's activation, in the unit of the costs; None for no limit.
        names: names of built-in schedules, files, functions FILE.py:NAME, tables, or recipes.
        effort: about the seconds to spend on each search.
        progress: called with the fraction of the work done, 0 to 1, and the next schedule's name.
        slices: how to cut microbatches into slices, for additional rows; None for no such rows.
        parts: the settings that every schedule gets, such as offload and sharding; None for none.
    Raises: ScheduleError for an unknown name.
    """
    # A value that is given twice would be two points at one place of the figure.
    places = list(product(dict.fromkeys(ranks), dict.fromkeys(microbatches), dict.fromkeys(costs)))
    points = []
    for n, (p, m, cost) in enumerate(places):

        def report(share: float, doing: str, n: int = n) -> None:
            progress((n + share) / len(places), doing)

        rows = compare(
            p,
            m,
            cost,
            memory,
            names=names,
            effort=effort,
            progress=report,
            slices=slices,
            parts=parts,
        )
        points.append(Comparison(p, m, cost, tuple(rows)))
    return points


def to_csv(points: Sequence[Comparison]) -> str:
    """Return CSV with a line for each schedule in each comparison; a refused one has the reason."""
    text = io.StringIO()
    # Columns are the fields of Row, so a new field is in the file without a change here.
    numbers = [field.name for field in fields(Row)]
    writer = csv.DictWriter(
        text, ["ranks", "microbatches", "costs", *numbers, "bubble_share", "refused"], restval=""
    )
    writer.writeheader()
    for point in points:
        for row in point.rows:
            place = {
                "ranks": point.ranks,
                "microbatches": point.microbatches,
                "costs": told(point.costs),
            }
            if isinstance(row, Refusal):
                writer.writerow({**place, "label": row.label, "refused": row.reason})
            else:
                writer.writerow({**place, **vars(row), "bubble_share": row.bubble_share})
    return text.getvalue()


def draw(
    points: Sequence[Comparison], files: Files, memory: float | None = None
) -> dict[Path, bytes]:
    """Return {path: content} of files with a figure: bars for one comparison, lines for several.

    Lines are in two rows of panels, here over m (microbatches) for two p (ranks):

        bubble  | lines over m, p = 4 | lines over m, p = 8 |
        peak    | lines over m, p = 4 | lines over m, p = 8 |

    Args:
        points: a comparison for each combination of ranks, microbatches and costs.
        memory: a limit on activation, for the caption and the bars; None for no limit.
    """
    limit = ""
    if memory is not None:
        limit = f" Memory {short(memory)} at most."
    if len(points) == 1:
        point = points[0]
        about = (
            "Mean time of the ranks until the last is done, "
            "and the most activation of one in microbatches of 1/p of "
            f"the model, at {point.text('ranks', 'microbatches', 'costs')}.{limit}"
        )
        # Inches: axes and legend take 0.9, each bar 0.12.
        height = 0.9 + 0.12 * len(point.measured)
        return files.draw(height, about, lambda figure: _bars(figure, point, memory))
    varied = [name for name in _AXES if len({getattr(point, name) for point in points}) > 1]
    same = points[0].text(*(name for name in _AXES if name not in varied))
    about = (
        "The bubble, and the most activation of a rank in microbatches of 1/p of the model"
        f"{', at ' * bool(same)}{same}; lower is better.{limit}"
    )
    labels = list(dict.fromkeys(row.label for point in points for row in point.measured))
    letters = max((len(name(label)) for label in labels), default=1)
    # Panels take 2.9 inches. An inch of width has 14 letters of the legend, a row of it is 0.12.
    height = 2.9 + 0.12 * len(labels) * (letters + 5) / files.width / 14

    def paint(figure: Figure) -> None:
        axes = _lines(figure, points, varied, labels)
        legend(figure, axes, files.width, letters)

    return files.draw(height, about, paint)


def name(label: str) -> str:
    """Return a schedule's name in a figure: its last 24 characters, so that bars have room.

    A file is named without its folder.
    """
    return plain(label.rpartition("/")[2][-24:])


def _lines(
    figure: Figure, points: Sequence[Comparison], varied: Sequence[str], labels: Sequence[str]
) -> Axes:
    """Draw a row of panels with bubbles and one with peak memory; return the first panel.

    Args:
        varied: the fields among "ranks", "microbatches" and "costs" with several values. The first
            is the horizontal axis. Each combination of the others' values has a column of panels.
        labels: the schedules to draw.
    """
    first, *others = varied
    panels: dict[str, list[Comparison]] = {}
    for point in points:
        panels.setdefault(point.text(*others), []).append(point)
    axes = figure.subplots(2, len(panels), sharex="col", sharey="row", squeeze=False)
    for column, (title, of) in enumerate(panels.items()):
        upper = axes[0][column]
        lower = axes[1][column]
        upper.set_title(title)
        # Values stand at equal distances: 4, 8, 16 and 64 microbatches would crowd on the left.
        ticks = list(range(len(of)))
        for label in labels:
            bubbles: list[float | None] = []
            peaks: list[float | None] = []
            for point in of:
                row = _fitting(point, label)
                # A point without this schedule leaves a gap in its line.
                bubbles.append(None if row is None else 100 * row.bubble_share)
                peaks.append(None if row is None else row.peak)
            look = _look(label, labels)
            upper.plot(ticks, bubbles, label=name(label), **look)
            lower.plot(ticks, peaks, **look)
        names, unit = _ticks([getattr(point, first) for point in of], _AXES[first])
        lower.set_xticks(ticks, names)
        lower.set_xlabel(unit)
    for panels_of in axes:
        panels_of[0].set_ylim(bottom=0)
    axes[0][0].set_ylabel("bubble, % of the period")
    axes[1][0].set_ylabel("peak activation")
    first_panel: Axes = axes[0][0]
    return first_panel


def _fitting(point: Comparison, label: str) -> Row | None:
    """Return a schedule's row in a comparison; None if it has none or exceeds the memory."""
    rows = (row for row in point.measured if row.label == label and row.fits)
    return next(rows, None)


def _ticks(values: Sequence[int | Costs], unit: str) -> tuple[list[str], str]:
    """Return (labels of the ticks, label of their axis).

    Costs that differ only in the time of a message are labelled with that time.

    Args:
        values: the values along the axis.
        unit: label of the axis, unless a message's time is all that differs.
    """
    costs = [x for x in values if isinstance(x, Costs)]
    without = {replace(x, comm=0.0) for x in costs}
    one_message = not any(isinstance(x.comm, tuple) for x in costs)
    if len(without) == 1 and one_message:
        return [f"{x.comm:g}" for x in costs], f"a message, where {told(*without)}"
    ticks = []
    for x in values:
        if isinstance(x, Costs):
            # The axis says F:B:W already. A line for each part keeps ticks narrow.
            ticks.append(told(x).replace("F:B:W = ", "").replace(" ", "\n"))
        else:
            ticks.append(str(x))
    return ticks, unit


def _look(label: str, labels: Sequence[str]) -> dict[str, str]:
    """Return matplotlib's colour, marker and style of a schedule's line, equal in every figure.

    Dashed lines are schedules with 4 stages per rank, or searched for the shortest period.

    Args:
        labels: all schedules of the figure.
    """
    plain_name, _, variant = label.partition(" ")
    known = [*SCHEDULES, *(x for x in labels if x.partition(" ")[0] not in SCHEDULES)]
    number = known.index(plain_name if plain_name in known else label)
    line = "-"
    if variant in ("v=4", "period"):
        line = "--"
    # Numbers of colours and marks have no common divisor, so that equal pairs are far from each
    # other.
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": _MARKS[number % len(_MARKS)],
        "linestyle": line,
    }


def _bars(figure: Figure, point: Comparison, memory: float | None) -> None:
    """Draw bars of computing and waiting time and of the peak, the shortest step that fits on top.

    Args:
        memory: a limit on activation to draw next to the peaks; None for none.
    """
    # matplotlib counts bars from below, so the last row is the top one.
    rows = sorted(point.measured, key=lambda row: (row.fits, -row.makespan))
    left, right = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": [2, 1]})
    places = range(len(rows))
    # Above the bar of the whole makespan, whose rest is then idle time.
    left.barh(
        places,
        [r.makespan * (1 - r.idle) for r in rows],
        color="#4573a7",
        label="compute",
        zorder=2,
    )
    left.barh(places, [r.makespan for r in rows], color="#c9d8ea", label="idle")
    left.set_yticks(places, [name(r.label) for r in rows])
    # naive takes p times as long and would leave the others a few pixels, so its bar is cut off.
    worth = [
        r.makespan for r in rows if r.label not in SCHEDULES or not SCHEDULES[r.label].dominated
    ]
    left.set_xlim(0, 1.15 * max(worth, default=1.0))
    left.set_xlabel("makespan")
    left.set_ylim(-0.6, len(rows) - 0.4)
    figure.legend(loc="outside lower left", ncols=2)
    for at, row in enumerate(rows):
        x = row.makespan
        side = "left"
        # The number of a bar that is cut off stands inside it.
        if x > left.get_xlim()[1]:
            x = left.get_xlim()[1]
            side = "right"
        left.text(x, at, f" {short(row.makespan)} ", va="center", ha=side, fontsize=5)
    shades = ["#8c7bb5" if r.fits else "#ddd" for r in rows]
    right.barh(places, [r.peak for r in rows], color=shades)
    right.set_xlabel("peak activation")
    right.tick_params(left=False)
    if memory is not None:
        right.axvline(memory, color="#c2185b", linestyle="--", linewidth=0.8)
