"""A stage's parameters in buckets: what is summed over the same ranks at once.

In its last weight pass a stage's layers are done from the last to the first, so a bucket has layers that follow each
other, and its sum can begin while the layers before them are still computed (Li et al. 2020, PyTorch DDP, sec. 3.2).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from megapipe.distributed.layout import layout_of

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Bucket(NamedTuple):
    """Some layers of a stage.

    Attributes:
        first: which of the stage's layers is the first of these, counted from 0. Before their sum can begin, all from
            it on must be done; what belongs to no layer is in the bucket of 0, which waits for the whole stage.
        layers: how many the stage has.
    """

    first: int
    layers: int
    params: dict[str, nn.Parameter]


def buckets_of(
    params: Mapping[str, nn.Parameter],
    least: int | None = None,
    number: int | None = None,
    apart: Sequence[Collection[str]] = (),
) -> list[Bucket]:
    """Buckets in the order in which they are done; the last one has `first` 0.

    Args:
        least: elements of each but that.
        number: how many there are at most, instead; neither: one.
        apart: names of those that travel otherwise than the rest, each kind in buckets of their own.
    """
    layer_of = {name: int(match[1]) for name in params if (match := _LAYER.search(name))}
    numbers = sorted(set(layer_of.values()))
    if number is not None:
        least = -(-sum(params[name].numel() for name in layer_of) // number)
    made: list[Bucket] = []
    end = len(numbers)
    for first in range(end - 1, 0, -1):
        own = {name: p for name, p in params.items() if layer_of.get(name) in numbers[first:end]}
        if least is not None and sum(p.numel() for p in own.values()) >= least:
            made.append(Bucket(first, len(numbers), own))
            end = first
    begun = {name for bucket in made for name in bucket.params}
    last = Bucket(0, len(numbers), {name: p for name, p in params.items() if name not in begun})
    return [bucket for all_of_it in (*made, last) for bucket in _alike(all_of_it, apart)]


def _alike(bucket: Bucket, apart: Sequence[Collection[str]]) -> list[Bucket]:
    """Experts by themselves, as other ranks have the same ones; before the rest, which they are done with."""
    kinds: dict[tuple[bool, ...], dict[str, nn.Parameter]] = {}
    for name, param in bucket.params.items():
        kinds.setdefault((not layout_of(param).experts, *(name not in one for one in apart)), {})[name] = param
    return [bucket._replace(params=kinds[kind]) for kind in sorted(kinds)] or [bucket]
