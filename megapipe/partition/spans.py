"""The layers of each stage. Every layer of the model is on exactly one stage of each chain, in order.

A split is the number of layers at each position of the chain; the placement deals positions to ranks. So one rule
serves loop, V and mirror, and no split can lose a layer: the numbers add up to --num-layers or are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

from megapipe.errors import ConfigError
from megapipe.schedule import Placement

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"


@dataclass(frozen=True)
class LayerSpan:
    """A stage's share of the model.

    Attributes:
        first, count: global number of its first layer, and how many there are; there may be none.
        embedding: does it embed the tokens?
        loss: does it hold the final norm, the output head and the loss?
        shares: of how many parts of the vocabulary embedding and head consist; 1 if the ends of the model have them.
        share: which part this stage has, None for none; in the first chain each rank's is of the rank's number.
        depth: of multi-token prediction, from 1; its one layer is numbered on behind the model's. 0: it is no depth.
    """

    first: int
    count: int
    embedding: bool
    loss: bool
    shares: int = 1
    share: int | None = None
    depth: int = 0

    @property
    def layers(self) -> range:
        """Global numbers of the layers."""
        return range(self.first, self.first + self.count)


def partition(
    num_layers: int,
    placement: Placement,
    *,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    first: int | None = None,
    last: int | None = None,
) -> tuple[LayerSpan, ...]:
    """The span of each stage by Megatron's flags: embedding first, loss last.

    Args:
        account_for_embedding, account_for_loss: each counts as one layer of its stage, and the stages are even so.
        first, last: layers of the first and of the last pipeline rank, dealt evenly to its stages in a chain; the
            others share the rest evenly. Under a V the first rank holds both ends of the model.
    Raises: ConfigError, with the nearest numbers that work, if the layers do not divide.
    """
    if first is None and last is None:
        counts = _even(num_layers, placement, account_for_embedding, account_for_loss)
    else:
        counts = _by_ends(num_layers, placement, first, last)
    return spans(counts, placement)


def spans(counts: Sequence[int], placement: Placement) -> tuple[LayerSpan, ...]:
    """The span of each stage. counts: layers at each position of the model's own chain."""
    assert len(counts) == placement.main, f"{len(counts)} positions for a chain of {placement.main}"
    counts = [*counts, *[1] * placement.depths]
    starts = list(accumulate(counts, initial=0))
    places = [placement.position(stage) for stage in range(placement.num_stages)]
    own = [placement.shares(stage) for stage in range(placement.num_stages)]
    return tuple(
        LayerSpan(
            starts[p],
            counts[p],
            p == 0,
            p == placement.main - 1,
            len(shares) or 1,
            placement.rank_of[p] if stage in shares else None,
            placement.depth(stage),
        )
        for stage, (p, shares) in enumerate(zip(places, own, strict=True))
    )


def whole(num_layers: int, depths: int = 0) -> tuple[LayerSpan, ...]:
    """The model in one piece, and each depth of multi-token prediction."""
    further = (LayerSpan(num_layers + n, 1, False, False, depth=n + 1) for n in range(depths))
    return LayerSpan(0, num_layers, True, True), *further


def nearly_even(num_layers: int, chain: int) -> tuple[int, ...]:
    """Layers of each position, those in front one more where they do not divide."""
    count, rest = divmod(num_layers, chain)
    return tuple(count + (position < rest) for position in range(chain))


def _even(num_layers: int, placement: Placement, embedding: bool, loss: bool) -> tuple[int, ...]:
    chain, extra = placement.chain, embedding + loss
    count, rest = divmod(num_layers + extra, chain)
    if rest:
        near = [n * chain - extra for n in (count, count + 1) if n * chain > extra]
        counted = " and ".join(["the embedding"] * embedding + ["the loss"] * loss)
        given = f"--num-layers {num_layers}" + (f" with {counted} counted as {extra}" if extra else "")
        raise ConfigError(
            f"{given} does not fill {chain} stages: {num_layers + extra} = {chain} x {count} + {rest}.\n"
            f"      Use --num-layers {' or '.join(map(str, near))}{_uneven(num_layers, placement)}."
        )
    return tuple(count - embedding * (p == 0) - loss * (p == chain - 1) for p in range(chain))


def _uneven(num_layers: int, placement: Placement) -> str:
    """Ways to keep the number of layers."""
    ways = []
    if (num_layers + 2) % placement.chain == 0:
        ways.append(f"{EMBEDDING} {LOSS}")
    share = num_layers // placement.num_ranks
    if placement.num_ranks > 1 and (near := _nearest(num_layers, placement, share, share)):
        ways.append(_flags(*near))
    return "".join(f",\n      or {way}" for way in [*ways, "--pipeline-model-parallel-layout auto"])


def _by_ends(num_layers: int, placement: Placement, first: int | None, last: int | None) -> tuple[int, ...]:
    counts = _ends(num_layers, placement, first, last)
    if counts is not None:
        return counts
    near = _nearest(num_layers, placement, first, last)
    remedy = "leave it out" if placement.num_ranks == 1 else "--pipeline-model-parallel-layout auto"
    raise ConfigError(
        f"{_flags(first, last)} of --num-layers {num_layers}: {_why_not(num_layers, placement, first, last)}.\n"
        f"      Use {f'{_flags(*near)}, or ' if near else ''}{remedy}."
    )


def _ends(num_layers: int, placement: Placement, first: int | None, last: int | None) -> tuple[int, ...] | None:
    """Layers of each position, None if these numbers do not divide."""
    columns = placement.rank_of[: placement.chain]
    given = [(rank, n) for rank, n in ((0, first), (placement.num_ranks - 1, last)) if n is not None]
    fixed, held = dict(given), Counter(columns)
    others = sum(rank not in fixed for rank in columns)
    rest = num_layers - sum(fixed.values())
    agree = all(fixed[rank] == n and n % held[rank] == 0 for rank, n in given)
    if not agree or rest < 0 or (rest % others if others else rest):
        return None
    return tuple(fixed[rank] // held[rank] if rank in fixed else rest // others for rank in columns)


def _why_not(num_layers: int, placement: Placement, first: int | None, last: int | None) -> str:
    columns = Counter(placement.rank_of[: placement.chain])
    if placement.num_ranks == 1:
        return f"the one rank holds all {num_layers}"
    given = {0: first, placement.num_ranks - 1: last}
    for rank, n in given.items():
        if n is not None and n % columns[rank]:
            return f"{n} layers do not divide by the {columns[rank]} stages of rank {rank}"
    ends = [rank for rank, n in given.items() if n is not None]
    rest = num_layers - (first or 0) - (last or 0)
    others = sum(count for rank, count in columns.items() if rank not in ends)
    if rest < 0:
        return f"that is {-rest} more than there are"
    if not others:
        return f"that leaves {rest} layers, and no rank is left for them"
    return (
        f"that leaves {rest} layers for {others} other stages: {rest} = {others} x {rest // others} + {rest % others}"
    )


def _nearest(
    num_layers: int, placement: Placement, first: int | None, last: int | None
) -> tuple[int | None, int | None] | None:
    """Return the numbers closest to the given ones that do divide, None if there are none."""
    ranks, held = placement.num_ranks, Counter(placement.rank_of[: placement.chain])
    if ranks == 1:
        all_of_them = None if first is None else num_layers, None if last is None else num_layers
        return all_of_them if num_layers % placement.chain == 0 else None
    others = placement.chain - (held[0] if first is not None else 0) - (held[ranks - 1] if last is not None else 0)
    best, distance = None, float("inf")
    for f in [0] if first is None else range(held[0], num_layers + 1, held[0]):
        for n in _lasts(num_layers - f, others, held[ranks - 1], last):
            away = (f - (first or 0)) ** 2 + (n - (last or 0)) ** 2
            if away < distance:
                best, distance = (f or None, n or None), away
    return best


def _lasts(rest: int, others: int, step: int, near: int | None) -> Iterator[int]:
    """Yield the multiples of `step` on both sides of `near` that leave a multiple of `others`; 0 stands for None."""
    if near is None:
        if (rest % others if others else rest) == 0:
            yield 0
        return
    if not others:
        if rest and rest % step == 0:
            yield rest
        return
    # step * j = rest modulo others: the solutions are j0, j0 + period, ...
    common = gcd(step, others)
    if rest % common:
        return
    period = others // common
    start = rest // common * pow(step // common, -1, period) % period
    low = min(near, rest) // step
    low -= (low - start) % period
    for j in (low, low + period):
        if 1 <= j <= rest // step:
            yield j * step


def _flags(first: int | None, last: int | None) -> str:
    return " ".join(f"{flag} {n}" for flag, n in ((FIRST, first), (LAST, last)) if n is not None)
