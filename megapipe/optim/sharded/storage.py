"""Choose how a rank stores its stages: the buckets of each, and the kind of flat buffers.

The kinds are unsharded or ZeRO-1, with full gradients released within a step, and with weights
gathered in 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from megapipe.config import OptimizerConfig
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

# By (full gradients are released within a step, weights are gathered in 8 bits).
_KINDS: Mapping[tuple[bool, bool], type[FlatBuffers]] = {
    (False, False): FlatBuffers,
    (True, False): ShardedBuffers,
    (False, True): InEightBits,
    (True, True): ShardedInEightBits,
}


class BucketWithOwner(NamedTuple):
    """A bucket of one of this rank's stages, and which rank updates it.

    Attributes:
        bucket: the parameters.
        stays: the bucket's gradients and weights are not sharded, though those in other buckets
            are. The bucket has rows of a vocabulary that is split over the pipeline, which passes
            need at any time.
        here: whether this rank has the bucket's optimizer state and updates it.
        owner: the rank that updates the bucket, as a position on the axis mesh.twins of the two
            ranks with equal stages under DualPipe. None if no other rank has a replica.
    """

    bucket: Bucket
    stays: bool
    here: bool
    owner: int | None

    @property
    def name(self) -> str:
        """A unique name of the bucket, equal on all ranks with these parameters."""
        return min(self.bucket.params, default="")


@dataclass(frozen=True)
class Storage:
    """The settings that decide which tensors are sharded, and how stages are cut into buckets.

    `layout` returns the buckets of stages, and `buffers` the flat buffers of a bucket.

    Attributes:
        flags: the optimizer's flags, for the types of gradients and main parameters.
        groups: gives each parameter's factors on learning rate and weight decay.
        ties: weights that several parameters share.
        live: counts the bytes of sharded tensors that are full at the moment.
        distributed: shard main parameters and state (ZeRO-1).
        grads: also shard gradients, except while passes use them (ZeRO-2).
        weights: also shard weights, except while passes use them (ZeRO-3).
        eight_bits: {name of a weight that is gathered in 8 bits: the module that multiplies by it
            in FP8}. These weights have buckets of their own.
        bucket_size: number of elements at which a bucket ends; None for no limit.
        num_buckets: number of buckets of each stage, instead of `bucket_size`; or None.
    """

    flags: OptimizerConfig
    groups: Groups
    ties: Ties
    live: Gauge
    distributed: bool
    grads: bool
    weights: bool
    eight_bits: Mapping[str, Scaled]
    bucket_size: int | None
    num_buckets: int | None

    def layout(self, stages: Sequence[nn.Module]) -> list[list[BucketWithOwner]]:
        """Return, for each stage, its buckets in the order in which gradients are complete."""
        chunks = []
        for stage in stages:
            params = dict(trained(stage))
            # Both kinds are gathered differently from the rest, thus in buckets of their own.
            staying = [name for name, param in params.items() if self._stays(param)]
            separate = (self.eight_bits, staying)
            buckets = buckets_of(params, self.bucket_size, self.num_buckets, separate)
            chunks.append([self._stored(bucket) for bucket in buckets])
        return chunks

    def _stays(self, param: nn.Parameter) -> bool:
        """Return whether a parameter is not sharded because it belongs to a shared vocabulary."""
        return self.distributed and self.grads and layout_of(param).part[1] > 1

    def _stored(self, bucket: Bucket) -> BucketWithOwner:
        """Return a bucket, with whether it is sharded and which rank updates it."""
        stays = any(map(self._stays, bucket.params.values()))
        stored = BucketWithOwner(bucket, stays, True, None)
        census = self.ties.census
        mesh = self.ties.mesh
        # A bucket's parameters are on one stage, so one name decides for all of them.
        if stored.name not in census.twins:
            return stored
        rank = census.owners[stored.name].rank
        owner = mesh.twins.ranks.index(mesh.pp.ranks[rank])
        return stored._replace(here=rank == mesh.pp.rank, owner=owner)

    def buffers(self, stored: BucketWithOwner) -> FlatBuffers:
        """Return new flat buffers for a bucket, of the class that the settings ask for.

        The bucket's parameters are either all dense or all of experts.
        """
        params = stored.bucket.params
        mesh = self.ties.mesh
        # Buckets are divided so that parameters of both kinds never meet.
        replicas = mesh.dp_cp
        if any(layout_of(param).experts for param in params.values()):
            replicas = mesh.edp
        split = self.distributed and replicas.size > 1
        eight = split and not params.keys().isdisjoint(self.eight_bits)
        sharded = split and self.grads and not stored.stays
        given: dict[str, Any] = {}
        if eight:
            given["products"] = self.eight_bits
        else:
            given["drops"] = sharded and self.weights
        if sharded:
            given["tied"] = self.ties.names
        buffers = _KINDS[sharded, eight](
            params,
            self.ties.borrowed,
            has_main=stored.here,
            device=mesh.device,
            replicas=replicas,
            distributed=split,
            groups=self.groups,
            grads_as=dtype_of(self.flags.main_grads_dtype),
            main_as=dtype_of(self.flags.main_params_dtype),
            live=self.live,
            **given,
        )
        # Before the next bucket is made: a device may have no room for all weights of the rank.
        buffers.end_whole()
        buffers.drop()
        return buffers


def in_eight_bits(stages: Sequence[nn.Module]) -> dict[str, Scaled]:
    """Return the trained weights that can be gathered in 8 bits, by name.

    Returns: {name of the weight: the module that multiplies by it in FP8}.
    """
    found = {}
    for stage in stages:
        for name, module in stage.named_modules():
            products = getattr(module, "products", None)
            if not isinstance(products, Scaled) or not module.weight.requires_grad:
                continue
            # mxfp8 quantises a weight differently for its two products, which together need as many
            # bytes as bf16.
            if products.recipe.kind != "mxfp8":
                found[f"{name}.weight"] = products
    return found


def dtype_of(name: str) -> torch.dtype | None:
    """Return torch.bfloat16 if a flag's value asks for it, else None.

    Args:
        name: the value of --main-grads-dtype or --main-params-dtype. A result of None leaves the
            buffers their usual type.
    """
    return torch.bfloat16 if name == "bf16" else None
