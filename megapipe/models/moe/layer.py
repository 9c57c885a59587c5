"""The mixture of experts, which replaces the MLP of a layer."""

from __future__ import annotations

from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, parameter
from megapipe.models.mlp import MLP
from megapipe.models.moe.experts import Experts
from megapipe.models.moe.router import Router, gated
from megapipe.models.parts import recipe_of
from megapipe.models.recompute import recompute
from megapipe.tensor_parallel.eager import eager


class MoE(nn.Module):
    """The weighted sum of each token's k experts, plus the shared expert if there is one.

    Args:
        layer: the layer's number in the whole model.
    """

    def __init__(self, config: ModelConfig, tp: Axis, layer: int) -> None:
        super().__init__()
        self.recompute_shared = config.recompute_shared_experts
        self.router = Router(config, tp, layer)
        self.experts = Experts(config, tp, recipe_of(config))
        shared = config.moe_shared_expert_intermediate_size
        self.shared_experts = SharedExperts(config, tp, shared) if shared else None

    # Not compiled: the router also records counts, losses and choices.
    @eager
    def forward(self, x: Tensor) -> Tensor:
        """Apply the experts: [s, b, h] -> [s, b, h]; under sequence parallelism [s/t, b, h]."""
        routed = self.experts(x, self.router(x))
        if self.shared_experts is None:
            return routed  # type: ignore[no-any-return]
        if self.recompute_shared:
            shared = recompute(self.shared_experts, x)
        else:
            shared = self.shared_experts(x)
        return routed + shared  # type: ignore[no-any-return]


class SharedExperts(MLP):
    """An MLP for every token. With --moe-shared-expert-gate a sigmoid gate scales the output.

    Args:
        ffn: width of the MLP.
    """

    def __init__(self, config: ModelConfig, tp: Axis, ffn: int) -> None:
        super().__init__(config, tp, ffn)
        self.gate_weight = None
        if config.moe_shared_expert_gate:
            shape = (1, config.hidden)
            # Every rank has the whole gate. Under sequence parallelism it sees only its own tokens.
            layout = Layout(shape, std=config.linear_std, sum_over_tp=config.sequence_parallel)
            self.gate_weight = parameter(layout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the shared experts to this rank's tokens.

        Args:
            x: [s, b, h]; under sequence parallelism [s/t, b, h].
        Returns: the same shape.
        """
        y = super().forward(x)
        if self.gate_weight is None:
            return y
        return y * gated(x, self.gate_weight)
