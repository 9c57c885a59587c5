"""The scene that all pictures of a schedule draw: tracks with boxes, colours and labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import Kind, Lane
from megapipe.schedule.passes import Pass, Placement, Schedule
from megapipe.schedule.simulate import Timeline, simulate, uncollected
from megapipe.schedule.views.lanes import ARITHMETIC, LINK, stretches

COLOURS = {kind: kind.traits.colour for kind in Kind}
"""Colours of the first chunk.

Any two differ in lightness or in blue, for readers with common kinds of colour blindness.
"""
LANES = (*(lane.value for lane in Lane), ARITHMETIC, LINK)


@dataclass(frozen=True)
class Box:
    """A pass with its start and end, in a picture."""

    item: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Track:
    """One line of a picture: a stream of a rank, or the arithmetic or communication in its passes.

    `boxes` yields all its boxes. The two boxes of an overlapped pair share the height of the line.

    Attributes:
        name: text in front of the line.
        steps: the boxes of each step: one for a pass, two for an overlapped pair.
        rank: the rank.
        stream: name of the stream, such as "compute" or "d2h". If `within`, "arithmetic" or "link",
            which is communication.
        within: the line shows the arithmetic or the communication within the passes of the
            compute stream above.
        gap: leave a gap above the line.
    """

    name: str
    steps: Sequence[tuple[Box, ...]]
    rank: int = 0
    stream: str = Lane.COMPUTE.value
    within: bool = False
    gap: bool = False

    @property
    def boxes(self) -> Iterator[Box]:
        return (box for step in self.steps for box in step)


@dataclass(frozen=True)
class Scene:
    """A table with its simulated times under given costs, as pictures need it.

    `kinds` returns the kinds of pass for the legend. `chunk` returns each stage's index among the
    stages of its rank, `fill` the colours of passes, and `curves` the memory of each rank over
    time.

    Attributes:
        schedule: the table.
        time: the simulated times and memory.
        tracks: for each rank its compute stream, the arithmetic and the communication within its
            passes if they have any, then its other streams.
    """

    schedule: Schedule
    time: Timeline
    tracks: tuple[Track, ...]

    @cached_property
    def kinds(self) -> list[Kind]:
        """Return the kinds of passes in the table, such as F, in the order of the legend."""
        return [kind for kind in Kind if kind in self.schedule.kinds]

    @cached_property
    def chunk(self) -> list[int]:
        return chunks(self.schedule.placement)

    @cached_property
    def fill(self) -> dict[tuple[Kind, int], str]:
        return shades(self.schedule.placement)

    @property
    def curves(self) -> list[dict[float, float]]:
        """Return, for each rank, {time: memory held from then on}.

        If the memory changes several times at one moment, the last value counts.
        """
        return [dict(curve) for curve in self.time.curves]


def scene_of(schedule: Schedule, costs: Costs = UNIT) -> Scene:
    """Return a schedule with its simulated times and the lines of its picture, as a `Scene`.

    Raises: ScheduleError if ranks deadlock.
    """
    # Pictures, traces and lines of a terminal all draw this. When each walked the table by itself,
    # a new stream or a part of a pass was written four times.
    time = simulate(schedule, costs)
    return Scene(schedule, time, tuple(_tracks(schedule, time, costs)))


@uncollected()
def tracks_of(schedule: Schedule, time: Timeline) -> list[Track]:
    """Return the lines of a picture for a table with this timeline.

    A rank's copies to the host (d2h) and back (h2d) are below its compute stream:

        rank 0 |F0  F1      B0  ...
           d2h |  O0  O1
           h2d |          L0

    Args:
        time: the timeline.
    """
    found = []
    for rank, lane in schedule.streams:
        name = f"rank {rank}"
        if lane is not Lane.COMPUTE:
            name = lane.value
        steps = []
        for step in schedule.ranks[rank]:
            if step[0].kind.traits.lane is lane:
                steps.append(tuple(Box(x, time.start[x], time.end[x]) for x in step))
        found.append(Track(name, steps, rank, lane.value))
    return found


def _tracks(schedule: Schedule, time: Timeline, costs: Costs) -> Iterator[Track]:
    for track in tracks_of(schedule, time):
        yield track
        if track.stream != Lane.COMPUTE.value or not costs.communicates:
            continue
        # The communication within passes is a stream of the GPU that the table does not name.
        for lane in (ARITHMETIC, LINK):
            parts = (x for x in stretches(schedule, costs, time, track.rank) if x.stream == lane)
            boxes = [(Box(x.item, x.start, x.end),) for x in parts]
            yield Track(lane, boxes, track.rank, lane, within=True)


def chunks(placement: Placement) -> list[int]:
    """Return, for each stage, its index among the stages of its rank.

    In DualPipe the index is the direction.
    """
    return [placement.stages_on(rank).index(stage) for stage, rank in enumerate(placement.rank_of)]


def shades(placement: Placement) -> dict[tuple[Kind, int], str]:
    """Return {(kind, stage): colour #rrggbb}. Later stages of a rank have lighter colours."""
    own = chunks(placement)
    # At most 60% of the way to white: still lighter shades of two kinds look the same. A rank with
    # many chunks has closer shades, not lighter ones.
    white = [0.6 * chunk / max(1, *own) for chunk in own]
    found = {}
    for kind, (stage, share) in product(Kind, enumerate(white)):
        levels = [round(part + (255 - part) * share) for part in rgb(COLOURS[kind])]
        found[kind, stage] = "#" + "".join(f"{level:02x}" for level in levels)
    return found


def rgb(colour: str) -> list[int]:
    """Return red, green and blue of #rrggbb, 0 to 255."""
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def lighter(placement: Placement) -> str:
    """Return the legend's words on lighter colours; "" if each rank has one stage."""
    if placement.num_stages == len(set(placement.rank_of)):
        return ""
    # In DualPipe the second chunk of a rank is the same part of the model as another rank's first.
    if placement.num_chains > 1:
        return "lighter: second direction"
    return "lighter: later chunk"


def is_dark(colour: str) -> bool:
    """Return whether text on the colour #rrggbb should be white, by its luma (Rec. 601)."""
    red, green, blue = rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def short(value: float) -> str:
    """Return a number with five significant digits, or as an integer from 100,000."""
    # Equal sums may differ in the last bits, and halves would then be rounded both ways.
    exact = float(f"{value:.12g}")
    # .5g would write 1e+05.
    if abs(exact) >= 1e5:
        return f"{exact:.0f}"
    return f"{exact:.5g}"
