"""Costs: how long passes take and how much they hold. Schedules are judged by nothing else.

A plain number is per *device share*: one microbatch through 1/P of the model, for P ranks. Every
schedule then gives a rank the same work, however many chunks it cuts. A tuple has the value of each
stage of the chain.

Inside a pass, arithmetic and communication alternate layer by layer. A pass alone takes the sum of
both. In an overlapped pair the communication of one pass hides under the arithmetic of the other;
the pair takes the makespan of the pieces of both (`pieces`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from megapipe.errors import ScheduleError
from megapipe.schedule.core.pieces import Chain, pieces
from megapipe.schedule.families import FAMILIES, FamilyCosts
from megapipe.schedule.families.family import PerStage as PerStage
from megapipe.schedule.families.family import mean
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Part, Placement, Schedule, Step

# Sums over the largest table of such numbers are still finite.
MOST = 1e100
_OF_LAYERS = {"f", "b", "w"}
SHARES = ("link_f", "link_b", "link_w")
HEAD = ("head_f", "head_b", "head_w")
"""Fields of the model's head, in the order of f, b and w."""
ATTENTION = ("attention_f", "attention_b", "attention_w")
"""Fields that are a share of another field."""
# More turns than this change nothing: a pair then takes the longer of its two sums.
_TURNS = 256


class Memory(NamedTuple):
    """The activation memory that a forward (F) leaves on each stage.

    Attributes:
        b: [num_stages] memory held from F until B.
        w: [num_stages] the part of that memory that is still held from B until W.
    """

    b: list[float]
    w: list[float]


@dataclass(frozen=True)
class CoreCosts:
    """Time and memory of F, B, W and messages.

    A single number is for one device share, 1/p of the model's layers on p ranks. A tuple has one
    value for each stage of a chain (one copy of the model).

    Attributes:
        f, b, w: time of forward, input gradient and weight gradient. BW costs b + w.
        fb: time of a forward and a fused backward as one overlapped pair, per device share. None
            computes it from the arithmetic and communication of both. A pair of F and B alone takes
            w less. No pair takes less than either of its passes alone.
        comm: time of a message between two ranks (latency and transfer; of one slice where
            microbatches are cut). Entry r of a tuple is for the link between ranks r and r+1, an
            optional last one for the link from p-1 to 0. A message occupies neither rank. Within a
            rank it takes no time.
        mem_b: activation of one microbatch, held from the start of F to the end of B (or BW).
        mem_w: the part of mem_b that is still held from the end of B to the end of W.
        overhead: added to every F, B, W and BW whatever the stage's size: host time and kernel
            launches. An overlapped pair costs it once, two passes run in sequence twice.
        link_f, link_b, link_w: the share of f, b and w that is communication within the pass: of
            experts, tensor or context parallelism. If all are 0 a pair takes the sum of its passes.
        piece: time of one such communication. A pass alternates between arithmetic and pieces of
            this length. 0 makes them so short that a pair takes the longer of its arithmetic and
            its communication.
        attention_f, attention_b, attention_w: the share of f, b and w that is causal attention.
            Attention's time grows with a slice's position in the sequence, all else with the
            slice's length.
        mem_k: memory of the keys and values of a microbatch, a part of mem_b.
        wide_k: size of the gradients of keys and values, as a multiple of mem_k. In slices they are
            held from the backward of the last slice to the backward of their own slice.
        mem_p: memory that F, B or BW needs only while it runs, such as a copy of the logits.
        head_f, head_b, head_w: the part of the last stage's f, b and w that is the model's head;
            None if not known. No simulation reads it. Whoever divides stages leaves it on the last.
    """

    f: PerStage = 1.0
    b: PerStage = 1.0
    w: PerStage = 1.0
    fb: float | None = None
    comm: float | tuple[float, ...] = 0.0
    mem_b: PerStage = 1.0
    mem_w: PerStage = 1.0
    overhead: float = 0.0
    link_f: float = 0.0
    link_b: float = 0.0
    link_w: float = 0.0
    piece: float = 0.0
    attention_f: PerStage = 0.0
    attention_b: PerStage = 0.0
    attention_w: PerStage = 0.0
    mem_k: PerStage = 0.0
    wide_k: float = 1.0
    mem_p: PerStage = 0.0
    head_f: float | None = None
    head_b: float | None = None
    head_w: float | None = None


@dataclass(frozen=True)
class Costs(FamilyCosts, CoreCosts):
    """Time and memory of passes and messages, each in any unit. The defaults are F = B = W = 1.

    The fields are those in `CoreCosts` and in the costs of each family of passes. Methods compute
    the time of a pass, pair or message (`durations`, `of_step`, `lag`) and memory (`memory`).
    `of_slice` returns the costs of one slice of a microbatch. `of_positions` returns the costs
    of the model's first `count` stages. `by_stage` returns one field as a value for each stage.

    Raises: ScheduleError for a number that is negative, NaN, or so large that sums may overflow,
    and for a share above 1.
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for number in value if isinstance(value, tuple) else (value,):
                if number is None:
                    continue
                if not 0 <= number <= MOST:
                    raise ScheduleError(
                        f"Costs.{name} must be a number from 0 to {MOST:g}, got {number}."
                    )
                if name in (*SHARES, *ATTENTION) and number > 1:
                    raise ScheduleError(
                        f"Costs.{name} is a share of the pass, from 0 to 1, got {number}."
                    )

    def durations(self, placement: Placement) -> dict[Kind, list[float]]:
        """Return {kind of pass: [num_stages] its duration on each stage}."""
        # In the order of the kinds, so that all ranks name the same field in an error.
        names = dict.fromkeys(name for kind in Kind for name in kind.traits.costs)
        stages = {name: self.by_stage(name, placement) for name in names}
        found = {}
        for kind in Kind:
            letters = kind.traits.costs
            base = self.overhead if letters[0] in _OF_LAYERS else 0.0
            columns = zip(*(stages[name] for name in letters), strict=True)
            found[kind] = [sum(parts, base) for parts in columns]
        return found

    def of_positions(self, count: int) -> Costs:
        """Return the costs with tuples cut to their first `count` values, one for each stage.

        This leaves out the last stages, which are the modules of multi-token prediction.
        """
        lists = {}
        for name, value in vars(self).items():
            if name != "comm" and isinstance(value, tuple):
                lists[name] = value[:count]
        return replace(self, **cast(dict[str, Any], lists))

    def lag(self, src: int, dst: int, ranks: int) -> float:
        """Return the time of a message from rank `src` to rank `dst`; 0 if they are equal.

        Between ranks that are not neighbours it is the time of the slowest link.

        Args:
            ranks: number of pipeline ranks.
        Raises: ScheduleError if `comm` is a tuple with too few links.
        """
        if src == dst:
            return 0.0
        if not isinstance(self.comm, tuple):
            return self.comm
        if len(self.comm) < ranks - 1:
            raise ScheduleError(
                f"Costs.comm names {len(self.comm)} links, but {ranks} ranks have at least "
                f"{ranks - 1}."
            )
        near = min(src, dst)
        far = max(src, dst)
        if far - near == 1:
            return self.comm[near]
        # A loop of several chunks goes from rank p-1 back to rank 0.
        if (near, far) == (0, ranks - 1) and len(self.comm) == ranks:
            return self.comm[-1]
        return max(self.comm)

    def of_slice(self, cuts: Sequence[float], of: Part | None) -> Costs:
        """Return the costs of one slice of a microbatch.

        Args:
            cuts: lengths of all slices of a microbatch, in any unit.
            of: (slice, first slice of its document, slice after the document's last), such as (1,
                0, 3) for slice 1 in a document of slices 0 to 2; None for a whole microbatch.
        Raises: ScheduleError if attention_f is a tuple by stage but f is one number; likewise for b
        and w.
        """
        if of is None:
            return self
        # Places in the microbatch, from 0 to 1. The slice is drawn double, its document single:
        #
        #     0     first ------ begin ====== end ------     1
        first, begin, end = (sum(cuts[:n]) / sum(cuts) for n in (of[1], of[0], of[0] + 1))
        # The last slice of a document copies the keys of all its slices, see `kinds._KEYS_BACK`.
        document = 0.0
        if of[0] + 1 == of[2]:
            document = end - first

        def part(time: PerStage, share: PerStage) -> PerStage:
            if isinstance(time, tuple):
                shares = share if isinstance(share, tuple) else (share,) * len(time)
                pairs = zip(time, shares, strict=True)
                return tuple(_of_slice(*pair, begin, end, first) for pair in pairs)
            if isinstance(share, tuple):
                raise ScheduleError(
                    "Costs name attention's share of each stage and not the times: "
                    "name both, or one."
                )
            return _of_slice(time, share, begin, end, first)

        parts: dict[str, Any] = {}
        for name in _BY_LENGTH:
            parts[name] = part(getattr(self, name), 0.0)
        for name in _OF_LAYERS:
            parts[name] = part(getattr(self, name), getattr(self, f"attention_{name}"))
        for family in FAMILIES:
            parts |= family.of_slice(vars(self), end - begin, document)
        # A pair shrinks by the same factor as its forward.
        if self.fb is not None:
            parts["fb"] = _of_slice(self.fb, mean(self.attention_f), begin, end, first)
        return replace(self, **parts)

    def check(self, placement: Placement) -> None:
        """Check that every tuple has a value for each stage of one copy of the model.

        Raises: ScheduleError naming the first field that has another number of values.
        """
        self.durations(placement)
        for name in vars(self):
            if name.startswith("mem_"):
                self.by_stage(name, placement)

    def memory(self, placement: Placement) -> Memory:
        """Return, for each stage, the memory that a forward keeps until its B and until its W."""
        return Memory(self.by_stage("mem_b", placement), self.by_stage("mem_w", placement))

    def held_by_rank(self, placement: Placement) -> list[float]:
        """Return, for each rank, the activation of one microbatch on all its stages together."""
        held = [0.0] * placement.num_ranks
        for rank, size in zip(placement.rank_of, self.memory(placement).b, strict=True):
            held[rank] += size
        return held

    @property
    def communicates(self) -> bool:
        """Return whether any pass has communication within it."""
        return any(getattr(self, name) for name in SHARES)

    def gradients_of_keys(self, stage: int, placement: Placement) -> float:
        """Return the size of the gradients of a microbatch's keys and values on a stage."""
        return self.wide_k * self._at("mem_k", stage, placement)

    def of_step(self, step: Step, placement: Placement, table: Schedule | None = None) -> float:
        """Return the duration of a step: of one pass, or of an overlapped pair.

        Args:
            step: one pass, or the two passes of an overlapped pair.
            table: the table of the step, if its microbatches are cut into slices; else None.
        """
        parts = [self] * len(step)
        if table:
            parts = [self.of_slice(table.cuts, table.part(x)) for x in step]
        priced = [*zip(step, parts, strict=True)]
        alone = [part._of_pass(x.kind, x.stage, placement) for x, part in priced]
        if len(step) == 1:
            return alone[0]
        if self.fb is not None and step[0].kind.is_forward and step[1].kind.is_backward:
            # The forward and the backward may be slices of different lengths.
            whole = sum(part.fb or 0.0 for part in parts) / 2
            whole = whole * placement.num_ranks / placement.chain
            splits = [part._at("w", x.stage, placement) for x, part in priced if x.kind.is_split]
            return max(whole - sum(splits) + self.overhead, *alone)
        if not self.communicates:
            return sum(alone)
        chains: list[Chain] = []
        for x, part in priced:
            chains += part.chains(x.kind, x.stage, placement)
        return max(max(piece.end for piece in pieces(chains)) + self.overhead, *alone)

    def chains(self, kind: Kind, stage: int, placement: Placement) -> list[Chain]:
        """Return the pieces of arithmetic and communication of a pass: one `Chain` for F, B or W.

        BW has two chains, for b and w. Piece i of its weight gradient (w) follows piece i of its
        input gradient (b).

        Args:
            kind: F, B, W or BW.
            stage: the stage of the pass.
        """
        # W alternates as its B does: its products run between the communications of B.
        lead = "f" if kind.is_forward else "b"
        turns = 0
        if self.piece:
            whole = self._at(lead, stage, placement) * getattr(self, f"link_{lead}")
            turns = min(max(1, round(whole / self.piece)), _TURNS)
        chains: list[Chain] = []
        for letter in kind.traits.costs:
            time = self._at(letter, stage, placement)
            share = getattr(self, f"link_{letter}", 0.0)
            compute = (1 - share) * time
            chains.append(Chain(compute, share * time, turns, letter == "b", bool(chains)))
        return chains

    def _of_pass(self, kind: Kind, stage: int, placement: Placement) -> float:
        """Return the duration of one pass of a kind on a stage.

        This is faster than `durations`, which computes all kinds and stages.
        """
        letters = kind.traits.costs
        parts = [self._at(letter, stage, placement) for letter in letters]
        base = self.overhead if letters[0] in _OF_LAYERS else 0.0
        return sum(parts, base)

    def by_stage(self, name: str, placement: Placement) -> list[float]:
        """Return the field called `name` as one value for each stage.

        Raises: ScheduleError if the field is a tuple with another number of values than one copy of
        the model has stages.
        """
        if isinstance(getattr(self, name), tuple):
            return [self._at(name, stage, placement) for stage in range(placement.num_stages)]
        return [self._at(name, 0, placement)] * placement.num_stages

    def _at(self, name: str, stage: int, placement: Placement) -> float:
        value: PerStage | None = getattr(self, name)
        if value is None:
            value = self.mem_b  # mem_o is a part of mem_b; None means all of it
        if not isinstance(value, tuple):
            if name in _OF_A_RANK:
                return value
            return value * (placement.num_ranks / placement.main)
        if len(value) != placement.chain:
            raise ScheduleError(
                f"Costs.{name} names {len(value)} stages, but the model is cut in "
                f"{placement.chain}."
            )
        return value[placement.position(stage)]


_BY_LENGTH = ("mem_b", "mem_w", "mem_k", "mem_p")
_OF_A_RANK = {*ATTENTION, *(name for family in FAMILIES for name in family.of_a_rank)}
"""Fields whose plain number is not per device share."""


def _of_slice(whole: float, attention: float, begin: float, end: float, first: float) -> float:
    """Return the part of a microbatch's time that its tokens from `begin` to `end` cost.

    Args:
        whole: the time of the microbatch.
        attention: the share of `whole` that is causal attention.
        begin, end: where the tokens begin and end in the sequence, from 0 to 1.
        first: where their document begins, from 0 to 1. A token attends to all earlier tokens from
            there.
    """
    by_length = end - begin
    # The token at x attends to x - first tokens. Their sum from begin to end is half of this area.
    # A microbatch that is one document has the area 1.
    by_area = (end - first) ** 2 - (begin - first) ** 2
    return whole * ((1 - attention) * by_length + attention * by_area)


UNIT = Costs()
"""F = B = W = 1, activations freed by W, no latency."""
