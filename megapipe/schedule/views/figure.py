"""Figures for paper and screen: SVG, PNG and PDF through matplotlib, at the width of a column.

The only file that knows matplotlib, an extra: whoever wants a figure asks `check` before the work that leads to it.
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

COLUMN, PAGE = 3.4, 7.0
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
    "text.parse_math": False,  # a dollar in the name of a file is one
    "pdf.fonttype": 42,  # letters that can be searched and that printers take
    "svg.fonttype": "none",
    "svg.hashsalt": "megapipe",  # the same drawing has the same bytes
}


@dataclass(frozen=True)
class Files:
    """Files that a figure goes to, in one format or several; flags of a command may begin with these."""

    svg: str | None = None
    """Draw a figure to this file."""
    png: str | None = None
    """A file with the figure as PNG."""
    pdf: str | None = None
    """A file with the figure as PDF."""
    width: float = COLUMN
    """The width of the figure in inches; its height follows. A column of a paper has 3.4, a page 7."""

    @property
    def named(self) -> dict[str, Path]:
        """The files that were asked for, by format."""
        paths = {"svg": self.svg, "png": self.png, "pdf": self.pdf}
        return {name: Path(path) for name, path in paths.items() if path is not None}

    @property
    def by_flag(self) -> dict[str, Path]:
        """They, by what asked for each."""
        return {f"--{kind}": path for kind, path in self.named.items()}

    def check(self) -> None:
        """Raises: ScheduleError if a figure is asked for and nothing here can draw it, or it has no room."""
        if self.width != COLUMN and not self.named:
            raise ScheduleError(
                f"--width {self.width:g} is of a figure, and none is asked for: add --pdf FILE"
            )
        for kind in self.named:
            if not 2 <= self.width <= 40:
                raise ScheduleError(
                    f"--width {self.width:g}: a figure is 2 to 40 inches wide, such as {COLUMN:g}"
                )
            if importlib.util.find_spec("matplotlib") is None:
                raise ScheduleError(
                    f"--{kind} needs matplotlib, which is not installed: pip install matplotlib"
                )

    def draw(
        self, height: float, caption: str, paint: Callable[[Figure], object]
    ) -> dict[Path, bytes]:
        """Draw once, and return what to write into each file. caption: what is seen and of which numbers."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        caption, drawn = plain(caption), dict[Path, bytes]()
        lines = textwrap.wrap(caption.replace(" = ", "\xa0=\xa0"), round(19.5 * self.width))
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
    """A name as a figure can show it: what no font prints, half a surrogate pair among it, is escaped."""
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def _about(kind: str, caption: str) -> dict[str, Any]:
    """The caption for who has the file alone; no date, which would change a file that shows the same."""
    if kind == "png":
        return {"Title": caption, "Software": "megapipe"}
    return {
        "Title": caption,
        "Creator": "megapipe",
        ("Date" if kind == "svg" else "CreationDate"): None,
    }


def legend(figure: Figure, axes: Axes, width: float, letters: int) -> None:
    """One legend below all axes. letters: of its longest name."""
    handles, names = axes.get_legend_handles_labels()
    columns = max(1, min(len(names), int(width * 14 / (letters + 5))))
    figure.legend(
        handles, names, loc="outside lower left", ncols=columns, columnspacing=1.0, handlelength=1.8
    )


def fitted_legend(figure: Figure, axes: Axes) -> None:
    """Put one legend below all axes, in as many columns as fit.

    The figure grows by the height of each row after the first.
    """
    handles, names = axes.get_legend_handles_labels()
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
