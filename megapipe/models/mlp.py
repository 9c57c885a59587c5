"""The feed-forward half of a layer. `activations` has the functions between its two layers.

Gate and up projections of a gated unit (Shazeer 2020) are one column-parallel weight.
"""

from __future__ import annotations

from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.models.activations import Xielu, activate
from megapipe.models.parts import parts_of


class MLP(nn.Module):
    """Two linear layers with an activation between them: h -> ffn -> h.

    The rows of a gated MLP's linear_fc1 are [gate; up]; tensor parallelism splits each of the two
    separately.

    Args:
        ffn: width between the layers; --ffn-hidden-size by default.
    """

    def __init__(self, config: ModelConfig, tp: Axis, ffn: int | None = None) -> None:
        super().__init__()
        self.config = config
        parts = parts_of(config, tp)
        ffn = ffn or config.ffn
        blocks = 2 if config.gated else 1
        self.linear_fc1 = parts.column(
            config.hidden, blocks * ffn, bias=config.has_bias("fc1"), blocks=blocks
        )
        # Two projections of each layer add to the residual stream. Their deviation is divided by
        # sqrt(2 layers), so that the sum does not grow with the depth (Radford et al. 2019, section
        # 2.3).
        self.linear_fc2 = parts.row(ffn, config.hidden, bias=config.has_bias("fc2"))
        self.act_fn = Xielu() if config.xielu else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP: [s, b, h] -> [s, b, h]; under sequence parallelism [s/t, b, h]."""
        scalars = () if self.act_fn is None else self.act_fn.scalars
        return self.linear_fc2(activate(self.linear_fc1(x), self.config, *scalars))  # type: ignore[no-any-return]
