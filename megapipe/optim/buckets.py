"""Divide a stage's parameters into buckets; one collective sums each over data parallelism.

The last weight pass of a step completes a stage's layers from the last to the first. A bucket holds
consecutive layers, and its sum can begin while earlier layers are still computed (Li et al. 2020,
PyTorch DDP, sec. 3.2).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from megapipe.distributed.layout import layout_of

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Bucket(NamedTuple):
    """The parameters of some consecutive layers of a stage, whose gradients are summed together.

    Attributes:
        first: position of the bucket's first layer within the stage, from 0. The sum can begin when
            the gradients of this layer and all later layers are complete. Parameters outside of
            layers are in the bucket with first 0, which waits for the whole stage.
        layers: number of all layers of the stage, not of this bucket.
        params: {name: parameter}.
    """

    first: int
    layers: int
    params: dict[str, nn.Parameter]


def buckets_of(
    params: Mapping[str, nn.Parameter],
    least: int | None = None,
    number: int | None = None,
    separate: Sequence[Collection[str]] = (),
) -> list[Bucket]:
    """Return a stage's buckets (parameters reduced together), in the order of their backward.

    The last bucket has the first layer and the parameters outside of layers. At the end each bucket
    is divided: experts, and each set in `separate`, get buckets of their own.

    Args:
        params: {name: parameter} of the stage.
        least: elements of a bucket before that division, at least; the last bucket may have fewer.
        number: the largest number of buckets before that division, instead of `least`. If both are
            None there is one bucket.
        separate: sets of parameter names.
    """
    layer_of = {}
    for name in params:
        match = _LAYER.search(name)
        if match:
            layer_of[name] = int(match[1])
    layers = sorted(set(layer_of.values()))
    # Rounded up, so that there are no more buckets than asked for.
    if number is not None:
        total = sum(params[name].numel() for name in layer_of)
        least = -(-total // number)
    made: list[Bucket] = []
    end = len(layers)
    # From the last layer down: a bucket is closed as soon as it is large enough.
    for first in range(end - 1, 0, -1):
        own = {name: p for name, p in params.items() if layer_of.get(name) in layers[first:end]}
        if least is not None and sum(p.numel() for p in own.values()) >= least:
            made.append(Bucket(first, len(layers), own))
            end = first
    used = {name for bucket in made for name in bucket.params}
    rest = {name: p for name, p in params.items() if name not in used}
    made.append(Bucket(0, len(layers), rest))
    return [part for bucket in made for part in _divided(bucket, separate)]


def _divided(bucket: Bucket, separate: Sequence[Collection[str]]) -> list[Bucket]:
    """Return a bucket divided into several: experts, each set of names in `separate`, and the rest.

    Experts are replicated on other ranks than dense parameters. Experts come first, because passes
    complete their gradients first.

    Args:
        separate: the sets of parameter names.
    """
    kinds: dict[tuple[bool, ...], dict[str, nn.Parameter]] = {}
    for name, param in bucket.params.items():
        is_dense = not layout_of(param).experts
        kind = (is_dense, *(name not in names for names in separate))
        # A separate set sorts before the rest, as False is less than True.
        kinds.setdefault(kind, {})[name] = param
    # A stage without parameters keeps an empty bucket, which takes part in collectives.
    return [bucket._replace(params=kinds[kind]) for kind in sorted(kinds)] or [bucket]
