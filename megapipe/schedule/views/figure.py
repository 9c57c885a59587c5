"""Figures for paper and screen: SVG, PNG and PDF through matplotlib, at the width of a column.

Only this file imports matplotlib, which is optional. Callers call `check` before they do the work
that leads to a figure.
"""

from __future__ import annotations

import importlib.util
import io
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapipe.errors import ScheduleError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN = 3.4
PAGE = 7.0
"""Inches: a column of a paper in two columns, and both."""
_STYLE = {
    "font.size": 7,
    "axes.labelsize": 7,
    "axes.titlesize": 7,
    "legend.fontsize": 6,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "axes.linewidth": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 0.9,
    "lines.markersize": 2.5,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "hatch.linewidth": 0.5,
    "savefig.dpi": 300,
    "text.parse_math": False,  # a dollar in the name of a file is no formula
    "pdf.fonttype": 42,  # text that can be searched and printed
    "svg.fonttype": "none",
    "svg.hashsalt": "megapipe",  # equal drawings have equal bytes
}


@dataclass(frozen=True)
class Files:
    """The flags of a command that say to which files a figure is written.

    `named` and `by_flag` return the paths. `check` refuses impossible figures. `draw` returns the
    bytes of each file.

    Attributes:
        svg, png, pdf: paths of the files to write; None for none.
        width: width of the figure in inches.
    """

    svg: str | None = None
    """Draw a figure to this file."""
    png: str | None = None
    """A file with the figure as PNG."""
    pdf: str | None = None
    """A file with the figure as PDF."""
    width: float = COLUMN
    """Width of the figure in inches; its height follows. A column of a paper has 3.4, a page 7."""

    @property
    def named(self) -> dict[str, Path]:
        """Return {"svg", "png" or "pdf": path} for the requested files."""
        paths = {"svg": self.svg, "png": self.png, "pdf": self.pdf}
        return {name: Path(path) for name, path in paths.items() if path is not None}

    @property
    def by_flag(self) -> dict[str, Path]:
        """Return {"--svg", "--png" or "--pdf": path} for the requested files."""
        return {f"--{kind}": path for kind, path in self.named.items()}

    def check(self) -> None:
        """Check that the requested figures can be drawn.

        Raises: ScheduleError if matplotlib is missing, or the width is not from 2 to 40 inches.
            Also for a width if no figure is requested.
        """
        # A width alone would be ignored without a word.
        if self.width != COLUMN and not self.named:
            raise ScheduleError(
                f"--width {self.width:g} is of a figure, and none is asked for: add --pdf FILE"
            )
        for kind in self.named:
            if not 2 <= self.width <= 40:
                raise ScheduleError(
                    f"--width {self.width:g}: a figure is 2 to 40 inches wide, such as {COLUMN:g}"
                )
            # Looking for it takes no time. Importing it here would, even if the work fails later.
            if importlib.util.find_spec("matplotlib") is None:
                raise ScheduleError(
                    f"--{kind} needs matplotlib, which is not installed: pip install matplotlib"
                )

    def draw(
        self, height: float, caption: str, paint: Callable[[Figure], object]
    ) -> dict[Path, bytes]:
        """Draw a figure once, and return {path: content} of each requested file.

        No file is written yet.

        Args:
            height: height of the figure in inches.
            caption: describes the figure and its numbers. The caption stands above the figure and
                in the file's metadata.
            paint: a function that draws into the figure.
        """
        # Only a figure takes the second to import it. `Figure` and not pyplot: that would choose a
        # window system.
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        caption = plain(caption)
        # Hard spaces keep "p = 8" on one line. An inch has 19.5 letters of 6.5 points.
        text = caption.replace(" = ", "\xa0=\xa0")
        lines = textwrap.wrap(text, round(19.5 * self.width))
        drawn = dict[Path, bytes]()
        # Within this block alone: the caller's own figures keep their style.
        with rc_context(_STYLE):
            figure = Figure(figsize=(self.width, height + 0.12 * len(lines)), layout="constrained")
            paint(figure)
            figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=6.5)
            for kind, path in self.named.items():
                file = io.BytesIO()
                figure.savefig(file, format=kind, metadata=_about(kind, caption))
                drawn[path] = file.getvalue()
        return drawn


def plain(text: str) -> str:
    """Return a name in which every character that cannot be printed is escaped."""
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def _about(kind: str, caption: str) -> dict[str, Any]:
    """Return the metadata of a file, without a date, so that equal figures are equal files.

    Args:
        kind: "svg", "png" or "pdf".
        caption: the description of the figure.
    """
    if kind == "png":
        return {"Title": caption, "Software": "megapipe"}
    date = "CreationDate"
    if kind == "svg":
        date = "Date"
    return {"Title": caption, "Creator": "megapipe", date: None}


def legend(figure: Figure, axes: Axes, width: float, letters: int) -> None:
    """Put one legend below all axes of a figure.

    Args:
        axes: the axes whose lines and their labels are the entries.
        width: width of the figure in inches.
        letters: number of characters in the longest label.
    """
    handles, names = axes.get_legend_handles_labels()
    # 14 letters an inch; the sample line and the gap of an entry take the place of five.
    columns = max(1, min(len(names), int(width * 14 / (letters + 5))))
    figure.legend(
        handles, names, loc="outside lower left", ncols=columns, columnspacing=1.0, handlelength=1.8
    )


def fitted_legend(figure: Figure, axes: Axes) -> None:
    """Put one legend below all axes of a figure, with as many columns of names as fit.

    The legend has the labels in `axes`. The figure grows by the height of each row of names after
    the first.
    """
    handles, names = axes.get_legend_handles_labels()
    # The width of a legend is known only once it is made. So try from one row downwards.
    for columns in range(len(names), 0, -1):
        made = figure.legend(
            handles,
            names,
            loc="outside lower left",
            ncols=columns,
            columnspacing=1.0,
            handlelength=1.0,
        )
        if made.get_window_extent().width <= figure.bbox.width or columns == 1:
            break
        made.remove()
    figure.set_figheight(figure.get_figheight() + 0.12 * (ceil(len(names) / columns) - 1))
