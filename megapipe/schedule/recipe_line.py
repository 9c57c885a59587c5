"""A recipe as one line: the words after `megapipe schedules show` that make the same table.

The line says how the table is made. It has neither costs nor a memory limit: `show` takes them from
its flags --costs and --memory.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from megapipe.schedule.catalogue import SCHEDULES, is_file
from megapipe.schedule.families.offload.asked import Offload
from megapipe.schedule.families.step.asked import StepPasses
from megapipe.schedule.ingredients import Pairing
from megapipe.schedule.patterns import SLICED
from megapipe.schedule.recipe import Recipe


def to_line(recipe: Recipe) -> str:
    """Return the arguments of the command `show` that make the recipe's table, as a shell line.

    If the order comes from a search, `show` repeats the search.
    """
    return shlex.join((*_words(recipe), *_parts(recipe)))


def parts_line(recipe: Recipe) -> str:
    """Return the flags of `schedules show` for what a recipe adds to its order, such as offload."""
    return shlex.join(_parts(recipe))


def _words(recipe: Recipe) -> Iterator[str]:
    """Yield the words of the shell line for a recipe's order, size, slices and pairs."""
    yield recipe.order
    # None for a file or a function, which may have any table.
    entry = (SCHEDULES | SLICED).get(recipe.order.lower())
    # A file has its own ranks and microbatches, and `show` refuses them next to it.
    if not is_file(recipe.order):
        yield from ("--pp", str(recipe.ranks), "--microbatches", str(recipe.microbatches))
        if recipe.chunks is not None:
            yield from ("--chunks", str(recipe.chunks))
        # --slices below says the number of slices, also for TeraPipe, Seq1F1B and SlimPipe.
        for name, value in recipe.options:
            if name != "slices" and value is not None:
                yield from ("--option", f"{name}={value}")
        # Without it `show` orders passes by its costs, where they have a say.
        by_costs = entry is None or "costs" in entry.takes or recipe.room_of_slices is not None
        if by_costs and recipe.fitted is None and recipe.search is None:
            yield "--as-published"
    # The cuts depend on costs, which the line does not have. So it names the lengths themselves.
    if recipe.cuts:
        yield from ("--slices", str(len(recipe.cuts)), "--cuts", _numbers(recipe.cuts))
        if recipe.documents:
            yield from ("--documents", str(len(recipe.documents[0]) + 1))
    if recipe.pairs is False:
        # Slices have separated all pairs.
        if not recipe.cuts and (entry is None or entry.pairs):
            yield "--no-pairs"
    elif isinstance(recipe.pairs, Pairing):
        yield from ("--pairs", f"{recipe.pairs.share:g}")
        if recipe.pairs.split:
            yield "--split-backwards"


def _parts(recipe: Recipe) -> Iterator[str]:
    """Yield the flags for what a recipe adds: multi-token prediction, offload, sharding."""
    # In the order in which a recipe applies them, so that the line reads as the table is made.
    if recipe.depths:
        yield from ("--depths", _numbers(recipe.depths))
    if recipe.vocabulary:
        yield "--vocabulary"
    if recipe.offload is not None:
        yield from _offload(recipe.offload)
    if recipe.sharding is not None:
        yield "--shard" if recipe.sharding.weights else "--shard-gradients"
    yield from _step(recipe.step)
    if recipe.replicas:
        yield "--replicas"


def _offload(offload: Offload) -> Iterator[str]:
    yield from ("--copies", offload.when)
    if offload.chunks is not None:
        yield from ("--copied-chunks", str(offload.chunks))
    if offload.switch is not None:
        yield from ("--switch", str(offload.switch))


def _step(step: StepPasses) -> Iterator[str]:
    asked = [name for name, given in vars(step).items() if given]
    if asked:
        yield from ("--step", ",".join(asked))


def _numbers(values: tuple[float, ...]) -> str:
    # 17 digits give back every float exactly.
    return ",".join(f"{value:.17g}" for value in values)
