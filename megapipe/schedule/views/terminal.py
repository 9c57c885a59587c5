"""A schedule as lines of text, one for each rank, coloured for a terminal or as plain ASCII."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import Kind, Lane
from megapipe.schedule.passes import Pass, Schedule
from megapipe.schedule.simulate import Timeline, simulate
from megapipe.schedule.views.compare import measure
from megapipe.schedule.views.lanes import communication
from megapipe.schedule.views.scene import Scene, is_dark, rgb, scene_of, short

_MOST_PER_PASS = 4
"""Most columns of the shortest pass, so that a small schedule stays narrow."""
_CUBE = (0, 95, 135, 175, 215, 255)
"""Levels of red, green and blue in the 6 x 6 x 6 colours of every colour terminal."""


def to_terminal(
    schedule: Schedule, costs: Costs = UNIT, *, width: int = 100, colour: bool = False
) -> str:
    """Return a schedule as text, one line for each rank, with time from left to right.

    Lines have at most `width` characters, but at least one column of time. A rank's streams of
    copies and collectives have lines of their own, and a legend is the last line. A cell has its
    pass and microbatch if they fit: F3, B3, W3, BW3, and F4&B1 for an overlapped pair. Passes of a
    rank's later stages are in lower case; in DualPipe, passes of the other direction. Idle time is
    dots, or blank in colour. A pass of a whole stage, such as the update, may take no time. Such a
    pass still has a column if other passes have three or more. 1F1B on two ranks:

        rank 0 |F0  F1  ......BW0   F2  BW1   ....BW2   |
        rank 1 |....F0  BW0   F1  BW1   F2  BW2   ......|

    Args:
        width: most characters of a line; the legend may be longer.
        colour: use a terminal's colours.
    Raises: ScheduleError if the schedule cannot proceed.
    """
    scene = scene_of(schedule, costs)
    time = scene.time
    margin = len(f"rank {len(schedule.ranks) - 1}")
    columns = _columns(time, width - margin - 3)
    scale = 0.0
    if time.makespan:
        scale = columns / time.makespan
    lengths = [time.end[x] - time.start[x] for x in time.start if not x.kind.traits.per_stage]
    roomy = scale * min(lengths, default=0) >= 3
    fill = scene.fill if colour else {}
    pen = _Pen(scene.chunk, fill)
    lines = []
    for track in scene.tracks:
        # Arithmetic and communication within a pass are finer than a column.
        if track.within:
            continue
        text = ""
        at = 0
        other = track.stream != Lane.COMPUTE.value
        for step in track.steps:
            first = round(step[0].start * scale)
            last = round(step[0].end * scale)
            # G, U, A and V often take no time by the costs, but a reader looks for them. They take
            # a column of the passes next to them where these have some to spare.
            if step[0].item.kind.traits.per_stage and (roomy or other):
                first = min(first, columns - 1)
                last = max(last, max(first, at) + 1)
            # A copy that is shorter than a column is shown if there is room.
            elif other and step[0].end > step[0].start and at < columns:
                first = min(first, columns - 1)
                last = max(last, first + (at <= first))
            first = max(first, at)
            last = min(max(last, at), columns)
            text += pen.idle * (first - at) + pen.step([box.item for box in step], last - first)
            at = last
        lines.append(f"{track.name:>{margin}} |{text}{pen.idle * (columns - at)}|")
    return "\n".join([*lines, _key(scene, pen)])


def facts(schedule: Schedule, costs: Costs, memory: float | None) -> list[str]:
    """Return five lines of numbers: times, activation, idle time, messages, parameters.

    There is a sixth line if passes have communication.

    Args:
        memory: limit on a rank's activation, in the unit of the costs; None for no limit.
    """
    timeline = simulate(schedule, costs)
    row = measure(schedule, costs)
    limit = ""
    if memory is not None:
        limit = f" of {short(memory)}"
    lines = [
        f"{schedule.name}: makespan {short(row.makespan)}, period {short(row.period)}, "
        f"bubble {short(row.bubble)} ({row.bubble_share:.1%} of the period)",
        f"activation: peak {short(row.peak)}{limit}; by rank {' '.join(map(short, timeline.peak))}",
        f"idle until the end: {row.idle:.1%}; by rank {' '.join(map(short, timeline.idle))}",
        f"communication: {sum(timeline.sent)} tensors; "
        f"sent by rank {' '.join(map(str, timeline.sent))}",
        f"parameters: {short(row.parameters)} device share(s) per rank",
    ]
    if costs.communicates:
        lines.append(str(communication(schedule, costs)))
    return lines


def _columns(time: Timeline, most: int) -> int:
    """Return the number of columns of the picture.

    The shortest pass has a whole number of columns, if there is room.

    Args:
        time: the timeline to draw.
        most: number of columns for which there is room.
    """
    lengths = [time.end[item] - time.start[item] for item in time.start]
    shortest = min((length for length in lengths if length > 0), default=0.0)
    each = 0
    if shortest:
        each = min(_MOST_PER_PASS, int(most * shortest / time.makespan + 1e-9))
    # Too narrow for a column of the shortest pass: all columns, and short passes share them.
    if not each:
        return max(1, most)
    return min(most, round(each * time.makespan / shortest))


@dataclass(frozen=True)
class _Pen:
    """A writer of the text cells in which passes are printed.

    `step` returns the cell of a step, `cell` the cell of one pass, and `tint` colours a text.
    `idle` is the character for idle time.

    Attributes:
        chunk: for each stage, its index among the stages of its rank.
        fill: {(kind, stage): colour #rrggbb}; empty for plain ASCII.
    """

    chunk: list[int]
    fill: dict[tuple[Kind, int], str]

    @property
    def idle(self) -> str:
        return " " if self.fill else "."

    def step(self, step: Sequence[Pass], columns: int) -> str:
        """Return a step in `columns` characters: a pass, or two overlapped passes joined by "&"."""
        if len(step) == 1:
            return self.cell(step[0], columns)
        # The ampersand is a column of the forward's half, so that a pair keeps its width.
        half = (columns + 1) // 2
        return self.cell(step[0], half, "&"[:half]) + self.cell(step[1], columns - half)

    def cell(self, item: Pass, columns: int, link: str = "") -> str:
        """Return the text of a cell, with the longest name of the pass that fits.

        The longest name is F12. If it does not fit, the name is 12 where colours show the kind of
        pass, else F. If that does not fit either, the cell is blank.

        Args:
            columns: width of the cell in characters.
            link: character after the name that joins the two passes of a pair.
        """
        kind: str = item.kind.value
        if self.chunk[item.stage]:
            kind = kind.lower()
        # The colour says the kind already, so the microbatch is worth more there.
        shorter = [kind, kind[0]]
        if self.fill:
            shorter = [item.of]
        room = columns - len(link)
        names = (f"{kind}{item.of}", *shorter, "")
        name = next(name for name in names if len(name) <= room)
        return self.tint(name.ljust(room) + link, item)

    def tint(self, text: str, item: Pass) -> str:
        """Return the text coloured as the pass, in the 256 colours of ECMA-48 terminals."""
        if not self.fill or not text:
            return text
        background = self.fill[item.kind, item.stage]
        # Not 24-bit colour: tmux and older terminals drop it.
        red, green, blue = map(_nearest, rgb(background))
        letters = 16
        if is_dark(background):
            letters = 231
        return f"\033[38;5;{letters};48;5;{16 + 36 * red + 6 * green + blue}m{text}\033[0m"


def _nearest(level: int) -> int:
    """Return the index in `_CUBE`, the levels of a terminal's colours, nearest to a level.

    Args:
        level: a colour's red, green or blue, 0 to 255.
    """
    return min(range(6), key=lambda n: abs(_CUBE[n] - level))


def _key(scene: Scene, pen: _Pen) -> str:
    words = [
        f"{pen.tint(kind.value, Pass(kind, 0, 0))} {kind.traits.meaning}" for kind in scene.kinds
    ]
    words.append("blank: idle" if pen.fill else ". idle")
    if max(pen.chunk):
        chunk = "later chunks"
        if scene.schedule.placement.num_chains > 1:
            chunk = "the other direction"
        words.append(f"lower case: {chunk}")
    return "; ".join(words)
