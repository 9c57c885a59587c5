"""The scene that all pictures of a schedule draw: tracks with boxes, colours and labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.kinds import Kind, Lane
from megapipe.schedule.passes import Pass, Placement, Schedule
from megapipe.schedule.simulate import Timeline, simulate, uncollected
from megapipe.schedule.views.lanes import ARITHMETIC, LINK, communicates, stretches

COLOURS = {kind: kind.traits.colour for kind in Kind}
"""Colours of the first chunk.

Any two differ in lightness or in blue, for readers with common kinds of colour blindness.
"""
LANES = (*(lane.value for lane in Lane), ARITHMETIC, LINK)


@dataclass(frozen=True)
class Box:
    """A pass with its start and end."""

    item: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Track:
    """One line of a picture: one stream of a rank, or a part of its passes.

    The boxes of a step share its height. With `within` the line has parts of the passes of the line
    above. With a gap it stands lower than usual.
    """

    name: str
    steps: Sequence[tuple[Box, ...]]
    rank: int = 0
    lane: str = Lane.COMPUTE.value
    within: bool = False
    apart: bool = False

    @property
    def boxes(self) -> Iterator[Box]:
        return (box for step in self.steps for box in step)


@dataclass(frozen=True)
class Scene:
    """A table with its timeline under costs.

    Attributes:
        tracks: for each rank its compute stream, parts of its passes, then its other streams that
            the table uses.
    """

    schedule: Schedule
    time: Timeline
    tracks: tuple[Track, ...]

    @cached_property
    def kinds(self) -> list[Kind]:
        """Return the kinds of the table, in the order of legends."""
        return [kind for kind in Kind if kind in self.schedule.kinds]

    @cached_property
    def chunk(self) -> list[int]:
        return chunks(self.schedule.placement)

    @cached_property
    def fill(self) -> dict[tuple[Kind, int], str]:
        return shades(self.schedule.placement)

    @property
    def curves(self) -> list[dict[float, float]]:
        """Return {time: memory held from then on} of each rank.

        At equal times the last value counts, so a B frees before the next F takes.
        """
        return [dict(curve) for curve in self.time.curves]


def scene_of(schedule: Schedule, costs: Costs = UNIT) -> Scene:
    """Return the scene of a schedule. Raises: ScheduleError if it cannot proceed."""
    time = simulate(schedule, costs)
    return Scene(schedule, time, tuple(_tracks(schedule, time, costs)))


def tracks(schedule: Schedule) -> list[tuple[int, Lane]]:
    """Return (rank, stream) of each line: the compute stream first, then others that are used."""
    used = [
        lane
        for lane in Lane
        if lane is Lane.COMPUTE or any(kind.traits.lane is lane for kind in schedule.kinds)
    ]
    return [(rank, lane) for rank in range(len(schedule.ranks)) for lane in used]


@uncollected()
def tracks_of(schedule: Schedule, time: Timeline) -> list[Track]:
    """Return the tracks of a table with this timeline."""
    return [
        Track(
            f"rank {rank}" if lane is Lane.COMPUTE else lane.value,
            [
                tuple(Box(x, time.start[x], time.end[x]) for x in step)
                for step in schedule.ranks[rank]
                if step[0].kind.traits.lane is lane
            ],
            rank,
            lane.value,
        )
        for rank, lane in tracks(schedule)
    ]


def _tracks(schedule: Schedule, time: Timeline, costs: Costs) -> Iterator[Track]:
    inner = (ARITHMETIC, LINK) if communicates(costs) else ()
    for track in tracks_of(schedule, time):
        yield track
        for lane in inner if track.lane == Lane.COMPUTE.value else ():
            parts = (x for x in stretches(schedule, costs, time, track.rank) if x.lane == lane)
            yield Track(
                lane, [(Box(x.item, x.start, x.end),) for x in parts], track.rank, lane, within=True
            )


def chunks(placement: Placement) -> list[int]:
    """Return which chunk of its rank each stage is. In DualPipe the chunk is the direction."""
    return [placement.stages_on(rank).index(stage) for stage, rank in enumerate(placement.rank_of)]


def shades(placement: Placement) -> dict[tuple[Kind, int], str]:
    """Return the colour #rrggbb of each kind and stage, lighter for later chunks of a rank."""
    own = chunks(placement)
    white = [0.6 * chunk / max(1, *own) for chunk in own]
    parts = {kind: [int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5)] for kind in Kind}
    return {
        (kind, stage): "#"
        + "".join(f"{round(part + (255 - part) * white[stage]):02x}" for part in parts[kind])
        for kind in Kind
        for stage in range(placement.num_stages)
    }


def lighter(placement: Placement) -> str:
    """Return the meaning of lighter colours, or nothing if a rank has one chunk."""
    if placement.num_stages == len(set(placement.rank_of)):
        return ""
    return "lighter: second direction" if placement.num_chains > 1 else "lighter: later chunk"


def is_dark(colour: str) -> bool:
    """Return whether text on #rrggbb should be white, by its Rec. 601 luma."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def short(value: float) -> str:
    """Return a number with five digits, without trailing zeros or an exponent from rounding."""
    # Equal sums may differ in the last bits, and halves would then be rounded both ways.
    exact = float(f"{value:.12g}")
    return f"{exact:.0f}" if abs(exact) >= 1e5 else f"{exact:.5g}"
