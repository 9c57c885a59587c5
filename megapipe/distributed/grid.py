"""The grids that the ranks of a world form: axes by name with their sizes, and which ranks lie along them.

There are two over the same ranks: of the dense part of a model, and of its experts. They share the pipeline alone, so
that experts may lie over ranks that have different tokens (Liu et al. 2025, MoE parallel folding). An axis is a name in
one of the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.config import ParallelConfig
from megapipe.errors import ConfigError

FLAGS = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "ep": "expert_model_parallel_size",
}
"""Fields of ParallelConfig that say the size of an axis; the others have what is left of the world."""


@dataclass(frozen=True)
class Grid:
    """The ranks of a world along axes.

    Attributes:
        sizes: of each axis by name, the one along which ranks are numbered first being the first.
    """

    sizes: dict[str, int]

    def ranks(self, *names: str) -> Tensor:
        """All ranks, the axes of these names as the last dimensions in this order."""
        slow = [*reversed(self.sizes)]
        whole = torch.arange(math.prod(self.sizes.values())).view([self.sizes[name] for name in slow])
        first = [name for name in slow if name not in names]
        return whole.permute([slow.index(name) for name in (*first, *names)])

    def sets(self, *names: str) -> list[tuple[int, ...]]:
        """The sets of ranks that differ along these axes alone, each in ascending order."""
        along = self.ranks(*(name for name in reversed(self.sizes) if name in names))
        return [*map(tuple, along.reshape(-1, math.prod(self.sizes[name] for name in names)).tolist())]


@dataclass(frozen=True)
class Grids:
    """The grids of a world, in Megatron-LM's order: tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp.

    Attributes:
        dense: tp, cp, dp, pp.
        experts: etp splits each expert, ep shares them, edp has the same ones; pp is that of `dense`.
    """

    dense: Grid
    experts: Grid

    @staticmethod
    def of(parallel: ParallelConfig, world_size: int) -> Grids:
        """Raises: ConfigError if the world does not divide by a grid's fixed sizes."""
        pp = parallel.pipeline_model_parallel_size
        dense = {"tp": parallel.tensor_model_parallel_size, "cp": parallel.context_parallel_size}
        experts = {"etp": parallel.etp, "ep": parallel.expert_model_parallel_size}
        grids = []
        for inner, replicas in ((dense, "dp"), (experts, "edp")):
            fixed = {**inner, "pp": pp}
            product = math.prod(fixed.values())
            if product < 1 or world_size % product:
                text = " x ".join(f"{FLAGS[name]} {size}" for name, size in fixed.items())
                raise ConfigError(
                    f"the world has {world_size} rank{'s' * (world_size > 1)}, no multiple of {text} = {product}. Start"
                    f" {max(product, 1)} processes, or a multiple (torchrun --nproc-per-node), or take other sizes."
                )
            outer = {replicas: world_size // product, "pp": pp}
            if parallel.use_tp_pp_dp_mapping:
                outer = dict(reversed(outer.items()))
            grids.append(Grid(inner | outer))
        return Grids(*grids)

    @property
    def sizes(self) -> dict[str, str]:
        """Sizes that flags say, as ranks compare them."""
        both = self.dense.sizes | self.experts.sizes
        said = {FLAGS[name]: str(size) for name, size in both.items() if name in FLAGS}
        return said | ({FLAGS["etp"]: "the default"} if both["etp"] == both["tp"] else {})

    def sets(self, *names: str) -> list[tuple[int, ...]]:
        """Sets of ranks of the grid that has these axes."""
        grid = self.dense if self.dense.sizes.keys() >= set(names) else self.experts
        return grid.sets(*names)
