"""Distribute the layers of a model over pipeline stages.

Every layer is on exactly one stage of each chain, in order; a chain is one way through all stages.
A split is the number of layers at each position of the chain, and the placement maps positions to
ranks. One rule thus serves loop, V and mirror placements. No split can lose a layer: numbers that
do not add up to --num-layers are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

from megapipe.errors import ConfigError
from megapipe.schedule import Placement

FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
EMBEDDING = "--account-for-embedding-in-pipeline-split"
LOSS = "--account-for-loss-in-pipeline-split"


@dataclass(frozen=True)
class LayerSpan:
    """The part of the model on one stage.

    Attributes:
        first: number of the stage's first layer in the whole model.
        count: number of layers on the stage, possibly 0.
        embedding: whether it embeds the tokens.
        loss: whether it holds the final norm, the output head and the loss.
        shares: number of parts into which the vocabulary is split, on as many ranks; 1 if the
            embedding and the head are on the first and the last stage alone.
        share: the vocabulary part on this stage, from 0; None for none. The parts are in the order
            of the ranks. DualPipe's second copy of the model, whose stages are on the ranks in
            reverse, has them in reverse too.
        depth: number of the stage's multi-token prediction module, from 1; 0 for a stage of the
            main model. A module has one layer, numbered after the model's layers.
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
        """The indices of the layers in the whole model, from 0."""
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
    """Return the span (layers, embedding, loss) of each stage by Megatron's flags.

    Args:
        num_layers: layers of the model.
        placement: the rank of each stage.
        account_for_embedding: count the embedding as a layer, so that its stage gets one less. Not
            read with `first` or `last`.
        account_for_loss: count the loss as a layer, in the same way.
        first: layers of the first pipeline rank, divided evenly among its stages. The other ranks
            divide the rest evenly. Under a V placement (stages down the ranks and up again) the
            first rank has both ends of the model.
        last: layers of the last pipeline rank, in the same way. None, like `first` None, gives no
            number.
    Raises: ConfigError, with the nearest numbers that work, if the layers do not divide evenly.
    """
    if first is None and last is None:
        counts = _even(num_layers, placement, account_for_embedding, account_for_loss)
    else:
        counts = _by_ends(num_layers, placement, first, last)
    return spans(counts, placement)


def spans(counts: Sequence[int], placement: Placement) -> tuple[LayerSpan, ...]:
    """Return the span of each stage, in the order of the placement's stages.

    Args:
        counts: layers of each stage from the embedding to the loss, without multi-token prediction.
        placement: the rank of each stage.
    """
    assert len(counts) == placement.main, f"{len(counts)} positions for a chain of {placement.main}"
    # Depths of multi-token prediction have one layer each, at the end of the chain.
    counts = [*counts, *[1] * placement.depths]
    starts = list(accumulate(counts, initial=0))
    found = []
    for stage in range(placement.num_stages):
        position = placement.position(stage)
        sharing = placement.shares(stage)
        # The ranks of the first chain share the vocabulary, each with the part of its own number.
        share = placement.rank_of[position] if stage in sharing else None
        span = LayerSpan(
            starts[position],
            counts[position],
            embedding=position == 0,
            loss=position == placement.main - 1,
            shares=len(sharing) or 1,
            share=share,
            depth=placement.depth(stage),
        )
        found.append(span)
    return tuple(found)


def whole(num_layers: int, depths: int = 0) -> tuple[LayerSpan, ...]:
    """Return the span of the undivided model, then one for each multi-token prediction module.

    num_layers: layers of the model. depths: number of multi-token prediction modules.
    """
    model = LayerSpan(0, num_layers, True, True)
    further = [LayerSpan(num_layers + n, 1, False, False, depth=n + 1) for n in range(depths)]
    return (model, *further)


def nearly_even(num_layers: int, chain: int) -> tuple[int, ...]:
    """Return the number of layers on each of `chain` successive stages, as even as possible.

    The first stages get one more if needed.

    Args:
        num_layers: layers of the model.
        chain: the number of stages.
    """
    count, rest = divmod(num_layers, chain)
    return tuple(count + (position < rest) for position in range(chain))


def _even(num_layers: int, placement: Placement, embedding: bool, loss: bool) -> tuple[int, ...]:
    """Return the number of layers of each stage from the embedding to the loss, in equal shares.

    Args:
        num_layers: layers of the model.
        placement: the rank of each stage.
        embedding, loss: count the embedding, or the loss, as a layer, so that its stage gets one
            less.
    Raises: ConfigError if the layers do not divide evenly.
    """
    chain = placement.chain
    extra = embedding + loss
    count, rest = divmod(num_layers + extra, chain)
    if rest:
        # The numbers of layers just below and just above that divide.
        near = [n * chain - extra for n in (count, count + 1) if n * chain > extra]
        given = f"--num-layers {num_layers}"
        if extra:
            counted = " and ".join(["the embedding"] * embedding + ["the loss"] * loss)
            given += f" with {counted} counted as {extra}"
        raise ConfigError(
            f"{given} does not fill {chain} stages: {num_layers + extra} = {chain} x {count} + "
            f"{rest}.\n"
            f"      Use --num-layers {' or '.join(map(str, near))}{_uneven(num_layers, placement)}."
        )
    return tuple(count - embedding * (p == 0) - loss * (p == chain - 1) for p in range(chain))


def _uneven(num_layers: int, placement: Placement) -> str:
    """Return the remedies that keep the number of layers, as the end of an error message.

    Args:
        num_layers: layers of the model.
        placement: the rank of each stage.
    """
    ways = []
    # Counting both ends as layers may make the numbers divide.
    if (num_layers + 2) % placement.chain == 0:
        ways.append(f"{EMBEDDING} {LOSS}")
    # Near an even split, so that the ends differ little from the other ranks.
    share = num_layers // placement.num_ranks
    if placement.num_ranks > 1:
        near = _nearest(num_layers, placement, share, share)
        if near:
            ways.append(_flags(*near))
    ways.append("--pipeline-model-parallel-layout auto")
    return "".join(f",\n      or {way}" for way in ways)


def _by_ends(
    num_layers: int, placement: Placement, first: int | None, last: int | None
) -> tuple[int, ...]:
    """Return the number of layers of each stage, for given numbers on the first and the last rank.

    Args:
        num_layers: layers of the model.
        placement: the rank of each stage.
        first, last: layers of the first and of the last pipeline rank; None if not given.
    Raises: ConfigError, with the nearest numbers that work, if the layers do not divide evenly.
    """
    counts = _ends(num_layers, placement, first, last)
    if counts is not None:
        return counts
    remedy = "--pipeline-model-parallel-layout auto"
    # No layout helps one rank, which has all layers in any case.
    if placement.num_ranks == 1:
        remedy = "leave it out"
    near = _nearest(num_layers, placement, first, last)
    if near:
        remedy = f"{_flags(*near)}, or {remedy}"
    reason = _why_not(num_layers, placement, first, last)
    raise ConfigError(
        f"{_flags(first, last)} of --num-layers {num_layers}: {reason}.\n      Use {remedy}."
    )


def _ends(
    num_layers: int, placement: Placement, first: int | None, last: int | None
) -> tuple[int, ...] | None:
    """Return the number of layers of each stage; None if the layers do not divide evenly.

    A given number is shared evenly by the stages of its rank. All other stages share the remaining
    layers evenly.

    Args:
        num_layers: layers of the model.
        placement: the rank of each stage.
        first, last: layers of the first and of the last pipeline rank; None if not given.
    """
    ranks = placement.rank_of[: placement.chain]
    ends = ((0, first), (placement.num_ranks - 1, last))
    given = [(rank, n) for rank, n in ends if n is not None]
    fixed = dict(given)
    stages_of = Counter(ranks)
    # A single rank is both the first and the last one, and two numbers for it may differ.
    agree = all(fixed[rank] == n and n % stages_of[rank] == 0 for rank, n in given)
    others = sum(rank not in fixed for rank in ranks)
    rest = num_layers - sum(fixed.values())
    fits = rest % others == 0 if others else rest == 0
    if not agree or rest < 0 or not fits:
        return None
    counts = []
    for rank in ranks:
        if rank in fixed:
            counts.append(fixed[rank] // stages_of[rank])
        else:
            counts.append(rest // others)
    return tuple(counts)


def _why_not(num_layers: int, placement: Placement, first: int | None, last: int | None) -> str:
    """Return the reason, as text, why the layers do not divide for these numbers of layers.

    first, last: layers of the first and of the last pipeline rank; None if not given.
    """
    stages_of = Counter(placement.rank_of[: placement.chain])
    if placement.num_ranks == 1:
        return f"the one rank holds all {num_layers}"
    # In the order of the checks in `_ends`.
    given = {0: first, placement.num_ranks - 1: last}
    for rank, n in given.items():
        if n is not None and n % stages_of[rank]:
            return f"{n} layers are not divisible by the {stages_of[rank]} stages of rank {rank}"
    ends = [rank for rank, n in given.items() if n is not None]
    rest = num_layers - (first or 0) - (last or 0)
    others = sum(count for rank, count in stages_of.items() if rank not in ends)
    if rest < 0:
        return f"that is {-rest} more than there are"
    if not others:
        return f"that leaves {rest} layers, and no rank is left for them"
    return (
        f"that leaves {rest} layers for {others} other stages: {rest} = {others} x {rest // others}"
        f" + {rest % others}"
    )


def _nearest(
    num_layers: int, placement: Placement, first: int | None, last: int | None
) -> tuple[int | None, int | None] | None:
    """Return (first, last), the numbers closest to the given ones with which the layers divide.

    The layers divide if a rank with a number shares its layers evenly among its stages, and all
    other stages share the rest evenly. A number that is not given stays None in the pair.

    Args:
        num_layers: layers of the model.
        placement: the rank of each stage.
        first, last: the given layers of the first and of the last pipeline rank.
    Returns: the pair; None if no numbers divide.
    """
    ranks = placement.num_ranks
    if ranks == 1:
        if num_layers % placement.chain:
            return None
        # The one rank is both ends and must have all layers.
        if first is None:
            return (None, num_layers)
        return (num_layers, None if last is None else num_layers)
    stages_of = Counter(placement.rank_of[: placement.chain])
    step_first = stages_of[0]
    step_last = stages_of[ranks - 1]
    others = placement.chain
    firsts: Sequence[int] = [0]
    if first is not None:
        others -= step_first
        firsts = range(step_first, num_layers + 1, step_first)
    if last is not None:
        others -= step_last
    # All numbers of the first rank are tried. For each, only two of the last rank can be nearest.
    best = None
    distance = float("inf")
    for f in firsts:
        for n in _lasts(num_layers - f, others, step_last, last):
            # Squares: two numbers that move by one are nearer than one that moves by two.
            away = (f - (first or 0)) ** 2 + (n - (last or 0)) ** 2
            if away < distance:
                best = (f or None, n or None)
                distance = away
    return best


def _lasts(rest: int, others: int, step: int, near: int | None) -> Iterator[int]:
    """Yield the possible numbers of layers of the last rank closest to `near`: at most two.

    Args:
        rest: layers of the last rank and of the stages without a given number.
        others: number of the stages without a given number, which divide their layers evenly.
        step: number of stages of the last rank, which divide its layers evenly.
        near: the given number. None if it is not given: the last rank is then one of the others. In
            that case 0 is yielded if `others` divides `rest`, else nothing.
    """
    if near is None:
        remainder = rest % others if others else rest
        if remainder == 0:
            yield 0
        return
    if not others:
        # The two ends are all stages: the last rank has whatever the first leaves.
        if rest and rest % step == 0:
            yield rest
        return
    # step * j = rest modulo others has the solutions j0, j0 + period, j0 + 2 * period, ...
    common = gcd(step, others)
    if rest % common:
        return
    period = others // common
    start = rest // common * pow(step // common, -1, period) % period
    # The largest solution that is not above `near`, and the next one.
    low = min(near, rest) // step
    low -= (low - start) % period
    for j in (low, low + period):
        if 1 <= j <= rest // step:
            yield j * step


def _flags(first: int | None, last: int | None) -> str:
    """Return the flags for this number of layers on the first and last rank; None for no flag."""
    return " ".join(f"{flag} {n}" for flag, n in ((FIRST, first), (LAST, last)) if n is not None)
