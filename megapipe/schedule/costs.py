"""Costs: what a pass takes and holds, the only numbers a schedule is ever judged by.

A plain number is per device share (one microbatch through 1/P of the model), so that every schedule does the same work
on a rank, however many chunks it cuts; a tuple names each stage of the chain and is taken as it is.

Inside a pass arithmetic and communication take turns, layer by layer. Alone a pass takes the time of both. Of two run
together the communication of one hides behind the arithmetic of the other: they take the makespan of their pieces on
two lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from megapipe.errors import ScheduleError
from megapipe.schedule.families import FAMILIES, FamilyCosts
from megapipe.schedule.families.family import PerStage as PerStage
from megapipe.schedule.kinds import Kind
from megapipe.schedule.passes import Part, Placement, Schedule, Step

MOST = 1e100
_OF_LAYERS = {"f", "b", "w"}
SHARES = ("link_f", "link_b", "link_w")
ATTENTION = ("attention_f", "attention_b", "attention_w")
"""Fields that are a share of another."""
_TURNS = 256  # of finer pieces the sums alone count


class Memory(NamedTuple):
    """What F leaves until B and until W, by stage."""

    b: list[float]
    w: list[float]


@dataclass(frozen=True)
class CoreCosts:
    """What F, B, W and messages take and hold.

    Attributes:
        f, b, w: forward, input gradient, weight gradient. BW costs b + w.
        link_f, link_b, link_w: the share of f, b and w that is communication within the pass: of experts, of tensor or
            context parallelism. 0 leaves nothing to hide: two passes run together take the sum of both.
        piece: time of one such communication, from which follows how often a pass takes turns; 0: so short that of two
            passes only the sums count, of arithmetic and of communication, the longer of which binds.
        fb: a forward and a fused backward run as one overlapped pair, per device share, in place of what follows from
            their pieces. A pair whose backward is split takes w less. No two passes take less than one of them alone.
        comm: time of a message between two ranks, latency and transfer, of a slice where microbatches are cut, of all
            links or of each: link r joins ranks r and r+1, the last one p-1 and 0. It occupies neither rank; a message
            within a rank costs nothing.
        attention_f, attention_b, attention_w: the share of f, b and w that is causal attention, which grows with the
            place in the sequence where a slice lies; all else grows with its length.
        mem_k: keys and values of a microbatch, which mem_b counts. Cut in slices their gradients take `wide_k` times as
            much beside, from the backward of the last slice to that of their own.
        overhead: what every F, B, W and BW costs in addition to its work, however small the stage: host time, launches.
            A pair costs it once if `fb` or a share of communication says that its passes overlap. Otherwise they run
            one after the other, and each costs it.
        mem_b: activation held from the start of F to the end of B (or BW).
        mem_w: the part of it held on from the end of B to the end of W.
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


@dataclass(frozen=True)
class Costs(FamilyCosts, CoreCosts):
    """Durations in any time unit, memory in any unit; the defaults are the papers' F = B = W.

    The fields are the core's (`CoreCosts`) and those of the families of passes.

    Raises: ScheduleError for a number that is negative, undefined, or so large that sums of it may be infinite.
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not 0 <= number <= MOST:
                    raise ScheduleError(f"Costs.{name} must be a number from 0 to {MOST:g}, got {number}.")
                if number is not None and name in (*SHARES, *ATTENTION) and number > 1:
                    raise ScheduleError(f"Costs.{name} is a share of the pass, from 0 to 1, got {number}.")

    def durations(self, placement: Placement) -> dict[Kind, list[float]]:
        """Duration of each kind of pass, by stage."""
        stages = {name: self.by_stage(name, placement) for kind in Kind for name in kind.traits.costs}
        return {
            kind: [
                sum(parts, self.overhead if kind.traits.costs[0] in _OF_LAYERS else 0.0)
                for parts in zip(*(stages[name] for name in kind.traits.costs), strict=True)
            ]
            for kind in Kind
        }

    def of_positions(self, count: int) -> Costs:
        """The costs of so many positions of the chain, the first: of the model's own where depths stand behind."""
        lists = {name: x[:count] for name, x in vars(self).items() if name != "comm" and isinstance(x, tuple)}
        return replace(self, **cast(dict[str, Any], lists))

    def lag(self, src: int, dst: int, ranks: int) -> float:
        """Time of a message from one rank to another; between ranks that are no neighbours, of the slowest link."""
        if src == dst:
            return 0.0
        if not isinstance(self.comm, tuple):
            return self.comm
        if len(self.comm) < ranks - 1:
            raise ScheduleError(
                f"Costs.comm names {len(self.comm)} links, but {ranks} ranks have at least {ranks - 1}."
            )
        near, far = min(src, dst), max(src, dst)
        if far - near == 1:
            return self.comm[near]
        return self.comm[-1] if (near, far) == (0, ranks - 1) and len(self.comm) == ranks else max(self.comm)

    def of_slice(self, cuts: Sequence[float], of: Part | None) -> Costs:
        """The costs of one slice of microbatches that are cut so; of whole ones these."""
        if of is None:
            return self
        first, begin, end = (sum(cuts[:n]) / sum(cuts) for n in (of[1], of[0], of[0] + 1))
        document = end - first if of[0] + 1 == of[2] else 0.0

        def part(time: PerStage, share: PerStage) -> PerStage:
            if isinstance(time, tuple):
                shares = share if isinstance(share, tuple) else (share,) * len(time)
                return tuple(_of_slice(*one, begin, end, first) for one in zip(time, shares, strict=True))
            if isinstance(share, tuple):
                raise ScheduleError("Costs name attention's share of each stage and not the times: name both, or one.")
            return _of_slice(time, share, begin, end, first)

        parts: dict[str, Any] = {name: part(getattr(self, name), 0.0) for name in _BY_LENGTH}
        parts |= {name: part(getattr(self, name), getattr(self, f"attention_{name}")) for name in _OF_LAYERS}
        for family in FAMILIES:
            parts |= family.of_slice(vars(self), end - begin, document)
        # A pair of a forward and a backward is as much shorter as the forward is.
        fb = None if self.fb is None else _of_slice(self.fb, _mean(self.attention_f), begin, end, first)
        return replace(self, **parts, fb=fb)

    def check(self, placement: Placement) -> None:
        """Raises: ScheduleError for costs that are not of these stages."""
        self.durations(placement)
        for name in vars(self):
            if name.startswith("mem_"):
                self.by_stage(name, placement)

    def memory(self, placement: Placement) -> Memory:
        """Return what F leaves until B and until W."""
        return Memory(self.by_stage("mem_b", placement), self.by_stage("mem_w", placement))

    def gradients_of_keys(self, stage: int, placement: Placement) -> float:
        """The gradients of mem_k of a stage."""
        return self.wide_k * self._at("mem_k", stage, placement)

    def of_step(self, step: Step, placement: Placement, table: Schedule | None = None) -> float:
        """Duration of a step: of one pass, or of two run together. table: says how microbatches are cut."""
        parts = [self.of_slice(table.cuts, table.part(x)) if table else self for x in step]
        alone = [part._of_pass(x.kind, x.stage, placement) for x, part in zip(step, parts, strict=True)]
        if len(step) == 1:
            return alone[0]
        if self.fb is not None and step[0].kind.is_forward and step[1].kind.is_backward:
            whole = sum(part.fb or 0.0 for part in parts) / 2 * placement.num_ranks / placement.chain
            splits = [part._at("w", x.stage, placement) for x, part in zip(step, parts, strict=True) if x.kind.is_split]
            return max(whole - sum(splits) + self.overhead, *alone)
        if not any(getattr(self, name) for name in SHARES):
            return sum(alone)
        chains = [
            chain for x, part in zip(step, parts, strict=True) for chain in part.chains(x.kind, x.stage, placement)
        ]
        return max(max(piece.end for piece in pieces(chains)) + self.overhead, *alone)

    def chains(self, kind: Kind, stage: int, placement: Placement) -> list[Chain]:
        """The pieces of a pass; those of weight gradients are a chain of their own, behind that of the input's."""
        lead = "f" if kind.is_forward else "b"  # W's products stand between the turns of its B
        turns = 0
        if self.piece:
            whole = self._at(lead, stage, placement) * getattr(self, f"link_{lead}")
            turns = min(max(1, round(whole / self.piece)), _TURNS)
        chains: list[Chain] = []
        for letter in kind.traits.costs:
            time, share = self._at(letter, stage, placement), getattr(self, f"link_{letter}", 0.0)
            chains.append(Chain((1 - share) * time, share * time, turns, letter == "b", bool(chains)))
        return chains

    def _of_pass(self, kind: Kind, stage: int, placement: Placement) -> float:
        """Duration of one pass, as `durations` has it: a search asks of pairs one by one."""
        letters = kind.traits.costs
        parts = [self._at(letter, stage, placement) for letter in letters]
        return sum(parts, self.overhead if letters[0] in _OF_LAYERS else 0.0)

    def by_stage(self, name: str, placement: Placement) -> list[float]:
        """Return a field for each stage."""
        if isinstance(getattr(self, name), tuple):
            return [self._at(name, stage, placement) for stage in range(placement.num_stages)]
        return [self._at(name, 0, placement)] * placement.num_stages

    def _at(self, name: str, stage: int, placement: Placement) -> float:
        value: PerStage | None = getattr(self, name)
        if value is None:
            value = self.mem_b  # a part of it, and nothing says how much
        if not isinstance(value, tuple):
            return value * (1 if name in _OF_A_RANK else placement.num_ranks / placement.main)
        if len(value) != placement.chain:
            raise ScheduleError(f"Costs.{name} names {len(value)} stages, but the model is cut in {placement.chain}.")
        return value[placement.position(stage)]


_BY_LENGTH = ("mem_b", "mem_w", "mem_k")
_OF_A_RANK = {*ATTENTION, *(name for family in FAMILIES for name in family.of_a_rank)}
"""Fields whose plain number is no device share."""


def _of_slice(whole: float, attention: float, begin: float, end: float, first: float) -> float:
    """The part of `whole` from `begin` to `end` of the sequence; a token attends to all from `first` on before it."""
    return whole * ((1 - attention) * (end - begin) + attention * ((end - first) ** 2 - (begin - first) ** 2))


def _mean(value: PerStage) -> float:
    return sum(value) / len(value) if isinstance(value, tuple) else value


class Chain(NamedTuple):
    """Pieces that follow each other: so many turns of arithmetic and of communication, 0 for as many as one likes.

    Attributes:
        link_first: communication comes first: a backward begins with what its forward ended with.
        behind: each turn follows that of the chain before it: a weight gradient the gradient of its output.
    """

    compute: float
    link: float
    turns: int
    link_first: bool
    behind: bool


class Piece(NamedTuple):
    """A piece of a step from its begin on: of one of its chains, arithmetic or communication on the link."""

    chain: int
    link: bool
    start: float
    end: float


def pieces(chains: Sequence[Chain]) -> list[Piece]:
    """Chains played on one lane for arithmetic and one for communication: the piece that can start first goes first,
    of several that of the chain with most left. Where turns are as many as one likes a chain has one piece on each."""
    played: list[Piece] = []
    free = [0.0, 0.0]

    def play(i: int, lane: int, after: float, turns: int) -> float:
        start = max(after, free[lane])
        free[lane] = start + (chains[i].link if lane else chains[i].compute) / turns
        played.append(Piece(i, bool(lane), start, free[lane]))
        return free[lane]

    if not all(chain.turns for chain in chains):
        for i in range(len(chains)):
            play(i, 0, 0.0, 1)
            play(i, 1, 0.0, 1)
        return played
    ends = [[0.0] for _ in chains]  # of a chain's pieces, of what stands before the first at 0
    for _ in range(sum(2 * chain.turns for chain in chains)):
        ready: list[tuple[float, float, int, int, float]] = []
        for i, chain in enumerate(chains):
            at = len(ends[i]) - 1
            lane = (at + chain.link_first) % 2
            needed = 2 * (at // 2 + 1) if chain.behind else 0  # both have as many turns
            if at < 2 * chain.turns and needed < len(ends[i - 1]):
                left = (1 - at / 2 / chain.turns) * (chain.compute + chain.link)
                after = max(ends[i][-1], ends[i - 1][needed])
                ready.append((max(after, free[lane]), -left, i, lane, after))
        _, _, i, lane, after = min(ready)
        ends[i].append(play(i, lane, after, chains[i].turns))
    return played


UNIT = Costs()
"""F = B = W = 1, activations freed by W, no latency."""
