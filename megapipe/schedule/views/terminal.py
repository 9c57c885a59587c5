"""A schedule as lines of text, one per rank: coloured for a terminal, or plain ASCII for anything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import Kind, Lane
from megapipe.schedule.passes import Pass, Schedule
from megapipe.schedule.simulate import Timeline, simulate
from megapipe.schedule.views.compare import measure
from megapipe.schedule.views.lanes import communicates, communication
from megapipe.schedule.views.scene import Scene, is_dark, scene_of, short

_MOST_PER_PASS = 4
"""Columns of the shortest pass; more would only spread a small schedule out."""
_CUBE = (0, 95, 135, 175, 215, 255)
"""Levels of red, green and blue in the 6 x 6 x 6 colours that every colour terminal has."""


def to_terminal(
    schedule: Schedule, costs: Costs = UNIT, *, width: int = 100, colour: bool = False
) -> str:
    """Draw a schedule in lines of at most `width` characters (but at least one column of time).

    A cell says its pass and microbatch where they fit: F3, B3, W3, BW3, and F4&B1 for an overlapped pair. Passes of a
    rank's later chunks (in DualPipe: of the other direction) are in lower case. Idle time is dots, or blank in colour.
    Where three columns are a pass, what is done to a stage as a whole takes one even if it costs no time.

    Raises: ScheduleError if the schedule cannot proceed.
    """
    scene = scene_of(schedule, costs)
    time = scene.time
    margin = len(f"rank {len(schedule.ranks) - 1}")
    columns = _columns(time, width - margin - 3)
    scale = columns / time.makespan if time.makespan else 0.0
    roomy = (
        scale
        * min(
            (time.end[x] - time.start[x] for x in time.start if not x.kind.traits.per_stage),
            default=0,
        )
        >= 3
    )
    pen = _Pen(scene.chunk, scene.fill if colour else {})
    lines = []
    for track in (track for track in scene.tracks if not track.within):
        text, at = "", 0
        for step in track.steps:
            first, last = round(step[0].start * scale), round(step[0].end * scale)
            if step[0].item.kind.traits.per_stage and (roomy or track.lane != Lane.COMPUTE.value):
                first = min(first, columns - 1)
                last = max(last, max(first, at) + 1)
            elif track.lane != Lane.COMPUTE.value and step[0].end > step[0].start and at < columns:
                first = min(first, columns - 1)
                last = max(
                    last, first + (at <= first)
                )  # shorter than a column, it is seen where there is room
            first, last = max(first, at), min(max(last, at), columns)
            text += pen.idle * (first - at) + pen.step([box.item for box in step], last - first)
            at = last
        lines.append(f"{track.name:>{margin}} |{text}{pen.idle * (columns - at)}|")
    return "\n".join([*lines, _key(scene, pen)])


def facts(schedule: Schedule, costs: Costs, memory: float | None) -> list[str]:
    """A schedule in numbers, in five lines; a sixth of the communication within its passes where costs have it."""
    timeline, row = simulate(schedule, costs), measure(schedule, costs)
    limit = "" if memory is None else f" of {short(memory)}"
    return [
        f"{schedule.name}: makespan {short(row.makespan)}, period {short(row.period)}, "
        f"bubble {short(row.bubble)} ({row.bubble_share:.1%} of the period)",
        f"activation: peak {short(row.peak)}{limit}; by rank {' '.join(map(short, timeline.peak))}",
        f"idle until the end: {row.idle:.1%}; by rank {' '.join(map(short, timeline.idle))}",
        f"communication: {sum(timeline.sent)} tensors; sent by rank {' '.join(map(str, timeline.sent))}",
        f"parameters: {short(row.parameters)} device share(s) per rank",
        *([str(communication(schedule, costs))] if communicates(costs) else []),
    ]


def _columns(time: Timeline, most: int) -> int:
    """Whole columns for the shortest pass if there is room, else all there is."""
    lengths = [time.end[item] - time.start[item] for item in time.start]
    shortest = min((length for length in lengths if length > 0), default=0.0)
    each = min(_MOST_PER_PASS, int(most * shortest / time.makespan + 1e-9)) if shortest else 0
    return min(most, round(each * time.makespan / shortest)) if each else max(1, most)


@dataclass(frozen=True)
class _Pen:
    """Writes cells: `chunk` of each stage, and `fill`, the colour of each kind and stage, empty for plain ASCII."""

    chunk: list[int]
    fill: dict[tuple[Kind, int], str]

    @property
    def idle(self) -> str:
        return " " if self.fill else "."

    def step(self, step: Sequence[Pass], columns: int) -> str:
        """A step in so many columns. A pair shares them: its forward, an ampersand, its backward."""
        if len(step) == 1:
            return self.cell(step[0], columns)
        half = (columns + 1) // 2
        return self.cell(step[0], half, "&"[:half]) + self.cell(step[1], columns - half)

    def cell(self, item: Pass, columns: int, link: str = "") -> str:
        kind = item.kind.value.lower() if self.chunk[item.stage] else item.kind.value
        names = [f"{kind}{item.of}", *([item.of] if self.fill else [kind, kind[0]]), ""]
        room = columns - len(link)
        return self.tint(next(name for name in names if len(name) <= room).ljust(room) + link, item)

    def tint(self, text: str, item: Pass) -> str:
        if not self.fill or not text:
            return text
        background = self.fill[item.kind, item.stage]
        levels = [int(background[i : i + 2], 16) for i in (1, 3, 5)]
        red, green, blue = (min(range(6), key=lambda n: abs(_CUBE[n] - level)) for level in levels)
        letters = 231 if is_dark(background) else 16
        return f"\033[38;5;{letters};48;5;{16 + 36 * red + 6 * green + blue}m{text}\033[0m"


def _key(scene: Scene, pen: _Pen) -> str:
    words = [
        f"{pen.tint(kind.value, Pass(kind, 0, 0))} {kind.traits.meaning}" for kind in scene.kinds
    ]
    words.append("blank: idle" if pen.fill else ". idle")
    if max(pen.chunk):
        chains = scene.schedule.placement.num_chains
        words.append(
            "lower case: the other direction" if chains > 1 else "lower case: later chunks"
        )
    return "; ".join(words)
