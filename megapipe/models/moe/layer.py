"""The mixture-of-experts half of a layer, in the place of an MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, set_layout
from megapipe.models.mlp import MLP
from megapipe.models.moe.experts import Experts
from megapipe.models.moe.router import Router, gated
from megapipe.models.parts import recipe_of
from megapipe.models.recompute import recompute
from megapipe.tensor_parallel.eager import eager


class MoE(nn.Module):
    """Each token's k experts, weighted, and the shared expert if there is one."""

    def __init__(self, config: ModelConfig, tp: Axis, layer: int) -> None:
        super().__init__()
        self.recompute_shared = config.recompute_shared_experts
        self.router = Router(config, tp, layer)
        self.experts = Experts(config, tp, recipe_of(config))
        shared = config.moe_shared_expert_intermediate_size
        self.shared_experts = SharedExperts(config, tp, shared) if shared else None

    @eager  # counts, losses and choices are more than its result says
    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]; under sequence parallelism [s/t, b, h]."""
        routed = self.experts(x, self.router(x))
        if self.shared_experts is None:
            return routed  # type: ignore[no-any-return]
        shared = recompute(self.shared_experts, x) if self.recompute_shared else self.shared_experts(x)
        return routed + shared  # type: ignore[no-any-return]


class SharedExperts(MLP):
    """An MLP that every token goes through, its output weighed by a gate if --moe-shared-expert-gate."""

    def __init__(self, config: ModelConfig, tp: Axis, ffn: int) -> None:
        super().__init__(config, tp, ffn)
        self.gate_weight = None
        if config.moe_shared_expert_gate:
            shape = (1, config.hidden)
            layout = Layout(shape, std=config.linear_std, sum_over_tp=config.sequence_parallel)
            self.gate_weight = set_layout(nn.Parameter(torch.empty(shape)), layout)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.gate_weight is None else y * gated(x, self.gate_weight)
