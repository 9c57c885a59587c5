"""The terms by which tables are judged while they are made; settings of pairs and of a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

from megapipe.errors import ScheduleError
from megapipe.schedule.costs import UNIT, Costs
from megapipe.schedule.memory.limits import by_rank
from megapipe.schedule.passes import Placement, Schedule
from megapipe.schedule.placement import loop, vee

# {0} and {1} become the user's names of the two parts, such as flags.
_CUT = "{0} cuts a table of F, B and W: leave out {1}."
EXCLUDED = (
    ("cuts", "pairs", _CUT),
    ("cuts", "vocabulary", _CUT),
    ("cuts", "depths", _CUT),
    (
        "pairs",
        "vocabulary",
        "{0} are made in a table of F, B and W, not with {1}. Leave one of them out.",
    ),
    (
        "sharding",
        "step",
        "{0} sums gradients after runs of passes, {1} once a step. Leave one of them out.",
    ),
    # Offload goes with each of them: it moves activations and changes no pass of another part.
)
"""(part, part, reason) for parts of a recipe that exclude each other."""


class Refused(ScheduleError):
    """An error in one setting of a table, such as its overlapped pairs or sharding.

    Attributes:
        part: the name of the setting, a field of `Recipe`.
    """

    def __init__(self, part: str, error: ScheduleError) -> None:
        super().__init__(error.problems)
        self.part = part


class CostModel(Protocol):
    """The costs and memory limits under which a table is made.

    `costs` returns times and memory of a table's stages. `room` returns the memory limits of its
    ranks, or None for no limits. Both depend on the table: a plan computes costs and limits from
    the layers that it puts on the stages. `FixedCosts` returns the same values for every table.
    """

    def costs(self, table: Schedule) -> Costs:
        """Return the costs of the passes of the table's stages."""
        ...

    def room(self, table: Schedule) -> tuple[float, ...] | None:
        """Return the limit on each rank's activation for this table; None for no limit.

        The limits are in the unit of the costs.
        """
        ...


@dataclass(frozen=True)
class FixedCosts:
    """Costs and memory limits that are the same for every table.

    Memory that a pass needs only while it runs (`Costs.mem_p`) is subtracted from the limits in
    `room`. So it is 0 in the result of `costs`.

    Attributes:
        price: the costs of any table.
        memory: the limit of each rank, or one for all of them; None for no limit.
        depths: number of modules of multi-token prediction. Tuples of costs have the values of
            these modules at their end, and are cut there for a table without the modules.
    """

    price: Costs = UNIT
    memory: float | tuple[float, ...] | None = None
    depths: int = 0

    def costs(self, table: Schedule) -> Costs:
        # `room` has room for what passes need while they run.
        price = replace(self.price, mem_p=0.0)
        # Depths come into a table late, see `recipe`. Before that their costs name no stage of it.
        if table.placement.depths == self.depths:
            return price
        return price.of_positions(table.placement.chain)

    def room(self, table: Schedule) -> tuple[float, ...] | None:
        if self.memory is None:
            return None
        place = table.placement
        limits = by_rank(self.memory, place.num_ranks)
        passing = self.price.of_positions(place.chain).by_stage("mem_p", place)
        return tuple(
            limit - max(passing[stage] for stage in place.stages_on(rank))
            for rank, limit in enumerate(limits)
        )


@dataclass(frozen=True)
class Pairing:
    """Settings of overlapped pairs: two passes run together, so that communication is hidden.

    `linked` returns the costs under which the pairs are chosen.

    Attributes:
        split: a backward that is not in a pair is split into B and W, even if the table has it
            fused.
        share: part of F and of B that is communication, if the costs name none; 0 keeps the costs.
    """

    split: bool = False
    share: float = 0.0

    def linked(self, costs: Costs) -> Costs:
        """Return the costs in which `share` of F and B is communication.

        Costs that already have communication or the time of a pair are returned unchanged.
        """
        # Measured costs say more than a share that a flag guesses.
        named = costs.fb is not None or costs.communicates
        if named or not self.share:
            return costs
        return replace(costs, link_f=self.share, link_b=self.share)


def refuse_idle(costs: Costs) -> None:
    """Refuse costs in which no pass has communication, so that overlapped pairs would hide nothing.

    Raises: ScheduleError that names the flag.
    """
    if costs.fb is None and not costs.communicates:
        raise ScheduleError(
            "pairs have nothing to hide, as no pass has communication. Say its share of a pass "
            "with --comm-share 0.2, or link_f and link_b in the file of --costs."
        )


@dataclass(frozen=True)
class Search:
    """The settings of a search for an order of passes.

    Attributes:
        placements: the placements to choose from.
        objective: to be minimised: "makespan", or "period" (longest time from a rank's first start
            to its last end).
        effort: about the seconds of one core to spend.
        seconds: CPU seconds of this process after which the search ends early.
        progress: called with the fraction of the effort spent, 0 to 1; None to call nothing.
    """

    placements: tuple[Placement, ...]
    objective: str = "makespan"
    effort: float = 4.0
    seconds: float = inf
    progress: Callable[[float], None] | None = field(default=None, compare=False, repr=False)


def placements(
    ranks: int,
    microbatches: int,
    placement: str | None,
    chunks: int | None,
    costs: Costs,
    objective: str,
) -> list[Placement]:
    """Return the placements that zb-auto, the search for an order of passes, tries.

    Args:
        placement: "loop", "v", or None for both.
        chunks: stages on each rank; None for 1, 2 and 4 in a loop.
        costs: if they have tuples with a value for each stage, only placements with as many stages
            are returned, if there is any.
        objective: only checked: "makespan" or "period".
    Raises: ScheduleError if arguments contradict each other.
    """
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(
            f"zb-auto needs at least 1 rank and 1 microbatch, got {ranks} and {microbatches}."
        )
    if placement not in (None, "loop", "v"):
        raise ScheduleError(f'zb-auto has the placements "loop" and "v", not "{placement}".')
    if objective not in ("makespan", "period"):
        raise ScheduleError(
            f'zb-auto has the objectives "makespan" and "period", not "{objective}".'
        )
    if chunks is not None and (chunks < 1 or (placement == "v" and chunks != 2)):
        raise ScheduleError(
            f"zb-auto cannot cut a {placement or 'loop'} in {chunks} chunks per rank; a V has 2."
        )
    places = []
    # The V first: of equal results the first wins, and a V has no message from the last rank back
    # to the first.
    if placement != "loop" and chunks in (None, 2):
        places.append(vee(ranks))
    if placement != "v":
        counts = (1, 2, 4) if chunks is None else (chunks,)
        places += [loop(ranks, v) for v in counts]
    fields = costs.f, costs.b, costs.w, costs.mem_b, costs.mem_w
    lengths = {len(x) for x in fields if isinstance(x, tuple)}
    # If no placement has this number of stages, the costs themselves say so when they are used.
    return [place for place in places if lengths <= {place.chain}] or places
