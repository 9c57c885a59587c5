"""The kind of flat buffers that parameters get: whole, ZeRO-1's, those that come and go, those in eight bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from megapipe.config import TrainConfig
from megapipe.distributed.layout import layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.buffers import FlatBuffers
from megapipe.optim.rule import Groups
from megapipe.optim.sharded.buffers import Live, ShardedBuffers
from megapipe.optim.sharded.eight_bits import eight_bits
from megapipe.tensor_parallel.fp8.products import Scaled


class Storage(NamedTuple):
    """The tensors of which a data-parallel rank has a share.

    Attributes:
        distributed: main parameters. grads, weights: also these, but while passes use them.
        tied: names of weights that are used several times.
        eight_bits: weights that passes have so, by name with their products; they are in buffers of their own.
    """

    train: TrainConfig
    groups: Groups
    tied: Collection[str]
    eight_bits: Mapping[str, Scaled]
    mesh: ProcessMesh
    live: Live
    distributed: bool
    grads: bool
    weights: bool

    def of(self, params: Mapping[str, nn.Parameter], borrowed: Collection[str], *, has_main: bool) -> FlatBuffers:
        """Buffers of parameters of one grid, which the same ranks have."""
        train, mesh, experts = self.train, self.mesh, any(layout_of(param).experts for param in params.values())
        replicas = mesh.edp if experts else mesh.dp_cp
        make: Callable[..., FlatBuffers] = partial(FlatBuffers, distributed=self.distributed)
        if self.distributed and replicas.size > 1:
            comes: dict[str, Any] = {"drops_weights": self.weights, "live": self.live}
            if params.keys() & self.eight_bits.keys():
                make = partial(eight_bits, products=self.eight_bits, shards_grads=self.grads, **comes)
            elif self.grads and not any(map(stays, params.values())):
                make = partial(ShardedBuffers, tied=self.tied, **comes)
        return make(
            params,
            borrowed,
            has_main=has_main,
            device=mesh.device,
            replicas=replicas,
            groups=self.groups,
            grads_as=dtype_of(train.main_grads_dtype),
            main_as=dtype_of(train.main_params_dtype),
        )


def in_eight_bits(stages: Sequence[nn.Module]) -> dict[str, Scaled]:
    """The trained weights whose products quantise them, by name: those of mxfp8, whose two products need different
    bytes, would be no fewer than in bf16."""
    found = (
        (f"{name}.weight", module.products)
        for stage in stages
        for name, module in stage.named_modules()
        if isinstance(getattr(module, "products", None), Scaled) and module.weight.requires_grad
    )
    return {name: products for name, products in found if products.recipe.kind != "mxfp8"}


def stays(param: nn.Parameter) -> bool:
    """Are its weight and gradient whole beside shares of others, as passes of a vocabulary use it between all runs?"""
    return layout_of(param).part[1] > 1


def dtype_of(name: str) -> torch.dtype | None:
    """The type that a --...-dtype names; None: as wide as is usual."""
    return torch.bfloat16 if name == "bf16" else None
