"""How a rank stores its stages: in which buckets, and as which kind of flat buffers (whole, ZeRO-1, gradients that come
and go, weights in eight bits)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from megapipe.config import TrainConfig
from megapipe.distributed.device import Gauge
from megapipe.distributed.layout import layout_of
from megapipe.optim.buckets import Bucket, buckets_of
from megapipe.optim.buffers import FlatBuffers
from megapipe.optim.census import trained
from megapipe.optim.rule import Groups
from megapipe.optim.sharded.buffers import ShardedBuffers
from megapipe.optim.sharded.eight_bits import InEightBits, ShardedInEightBits
from megapipe.optim.ties import Ties
from megapipe.tensor_parallel.fp8.products import Scaled

# By (do gradients come and go?, do passes have weights in eight bits?)
_KINDS: Mapping[tuple[bool, bool], type[FlatBuffers]] = {
    (False, False): FlatBuffers,
    (True, False): ShardedBuffers,
    (False, True): InEightBits,
    (True, True): ShardedInEightBits,
}


class Stored(NamedTuple):
    """A bucket of one of this rank's stages and where its state is.

    Attributes:
        stays: its gradients and weights are whole among shares of others: passes of a vocabulary use them between runs.
        here: this rank updates it.
        owner: the one of mesh.twins that does; None if no other rank has these parameters.
    """

    bucket: Bucket
    stays: bool
    here: bool
    owner: int | None

    @property
    def name(self) -> str:
        """A name of its own, the same on all ranks with these parameters."""
        return min(self.bucket.params, default="")


@dataclass(frozen=True)
class Storage:
    """What data-parallel ranks share out, and how stages are cut in buckets.

    Attributes:
        distributed: main parameters (ZeRO-1). grads, weights: these too, except while passes use them (ZeRO-2, ZeRO-3).
        eight_bits: weights that passes have so, by name with their products; they are in buffers of their own.
        bucket_size, num_buckets: as in `buckets_of`.
    """

    train: TrainConfig
    groups: Groups
    ties: Ties
    live: Gauge
    distributed: bool
    grads: bool
    weights: bool
    eight_bits: Mapping[str, Scaled]
    bucket_size: int | None
    num_buckets: int | None

    def layout(self, stages: Sequence[nn.Module]) -> list[list[Stored]]:
        """Cut each stage in buckets, in the order in which passes are done with them."""
        chunks = []
        for stage in stages:
            params = dict(trained(stage))
            apart = (self.eight_bits, [name for name, param in params.items() if self._stays(param)])
            chunks.append(list(map(self._stored, buckets_of(params, self.bucket_size, self.num_buckets, apart))))
        return chunks

    def _stays(self, param: nn.Parameter) -> bool:
        return self.distributed and self.grads and layout_of(param).part[1] > 1

    def _stored(self, bucket: Bucket) -> Stored:
        stored = Stored(bucket, any(map(self._stays, bucket.params.values())), True, None)
        census, mesh = self.ties.census, self.ties.mesh
        if stored.name not in census.twins:
            return stored
        rank = census.owners[stored.name].rank
        return stored._replace(here=rank == mesh.pp.rank, owner=mesh.twins.ranks.index(mesh.pp.ranks[rank]))

    def buffers(self, stored: Stored) -> FlatBuffers:
        """Make the buffers of a bucket, whose parameters are of one grid."""
        params, mesh = stored.bucket.params, self.ties.mesh
        replicas = mesh.edp if any(layout_of(param).experts for param in params.values()) else mesh.dp_cp
        split = self.distributed and replicas.size > 1
        eight = split and not params.keys().isdisjoint(self.eight_bits)
        sharded = split and self.grads and not stored.stays
        given: dict[str, Any] = {"products": self.eight_bits} if eight else {"drops": sharded and self.weights}
        if sharded:
            given["tied"] = self.ties.names
        return _KINDS[sharded, eight](
            params,
            self.ties.borrowed,
            has_main=stored.here,
            device=mesh.device,
            replicas=replicas,
            distributed=split,
            groups=self.groups,
            grads_as=dtype_of(self.train.main_grads_dtype),
            main_as=dtype_of(self.train.main_params_dtype),
            live=self.live,
            **given,
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


def dtype_of(name: str) -> torch.dtype | None:
    """The type that a --...-dtype names; None: as wide as is usual."""
    return torch.bfloat16 if name == "bf16" else None
