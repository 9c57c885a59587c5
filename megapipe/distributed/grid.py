"""Arrange the ranks of a world along named axes, as two grids over the same ranks.

One grid is for the dense part of a model, the other for its experts. They share only the pipeline
axis. Experts may therefore be spread over ranks with different tokens, by MoE parallel folding (Liu
et al. 2025). An axis is a name in one of the grids.
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
"""The field of ParallelConfig with an axis's size. Other sizes follow from the world's."""


@dataclass(frozen=True)
class Grid:
    """The ranks of a world, arranged along axes.

    `ranks` returns them as a tensor, and `sets` as sets along some axes.

    Attributes:
        sizes: {name of an axis: its size}, the fastest axis first. With {"tp": 2, "pp": 2} ranks 0
            and 1 are neighbours along tp, ranks 0 and 2 along pp.
    """

    sizes: dict[str, int]

    def ranks(self, *names: str) -> Tensor:
        """Return all ranks as a tensor: first a dimension for each other axis, then `names`.

        The other axes come in the reverse order of `sizes`. For {"tp": 2, "dp": 2, "pp": 2},
        ranks("dp") has the dimensions [pp, tp, dp].
        """
        # A tensor counts its last dimension fastest, `sizes` names the fastest axis first.
        slow = [*reversed(self.sizes)]
        shape = [self.sizes[name] for name in slow]
        ranks = torch.arange(math.prod(shape)).view(shape)
        first = [name for name in slow if name not in names]
        return ranks.permute([slow.index(name) for name in (*first, *names)])

    def sets(self, *names: str) -> list[tuple[int, ...]]:
        """Return the sets of ranks that differ only along the named axes, each in rising order.

        For {"tp": 2, "pp": 2}, sets("pp") is [(0, 2), (1, 3)].
        """
        along = [name for name in reversed(self.sizes) if name in names]
        size = math.prod(self.sizes[name] for name in names)
        return [*map(tuple, self.ranks(*along).reshape(-1, size).tolist())]


@dataclass(frozen=True)
class Grids:
    """The two grids of a world: one for dense layers, and one for experts.

    The order of axes is Megatron-LM's: tp-cp-ep-dp-pp or tp-cp-ep-pp-dp. Neighbouring ranks differ
    along the first axis. `of` makes the grids from flags, and `sets` returns sets of ranks along
    some axes.

    Attributes:
        dense: the axes tp, cp, dp and pp.
        experts: the axes etp, ep, edp and pp. etp splits each expert, ep distributes the experts,
            and ranks along edp have equal experts. pp is the same as in `dense`.
    """

    dense: Grid
    experts: Grid

    @staticmethod
    def of(parallel: ParallelConfig, world_size: int) -> Grids:
        """Return the grids of a world.

        Raises: ConfigError unless the world size is a multiple of tp x cp x pp and of etp x ep x
            pp.
        """
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
                    f"the world has {world_size} rank{'s' * (world_size > 1)}, no multiple of "
                    f"{text} = {product}. Start {max(product, 1)} processes, or a multiple "
                    "(torchrun --nproc-per-node), or take other sizes."
                )
            # Replicas take the ranks that the fixed sizes leave.
            outer = {replicas: world_size // product, "pp": pp}
            if parallel.use_tp_pp_dp_mapping:
                # Megatron-LM's flag: neighbours along pp are then closer than neighbours along dp.
                outer = dict(reversed(outer.items()))
            grids.append(Grid(inner | outer))
        return Grids(*grids)

    @property
    def sizes(self) -> dict[str, str]:
        """The sizes that flags give, as text for ranks to compare: {field of ParallelConfig: size}.

        The text is "the default" if etp equals tp.
        """
        both = self.dense.sizes | self.experts.sizes
        texts = {FLAGS[name]: str(size) for name, size in both.items() if name in FLAGS}
        # A rank that was given the default's value equals one that was given nothing.
        if both["etp"] == both["tp"]:
            texts[FLAGS["etp"]] = "the default"
        return texts

    def sets(self, *names: str) -> list[tuple[int, ...]]:
        """Return the sets of ranks that differ only along the named axes.

        The sets are taken from the grid, dense or of experts, that has all of these axes.
        """
        # Only pp is in both grids, with equal sets.
        grid = self.dense if self.dense.sizes.keys() >= set(names) else self.experts
        return grid.sets(*names)
