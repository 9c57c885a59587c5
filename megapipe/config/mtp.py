"""Multi-token prediction (DeepSeek-V3 report, section 2.2): how far ahead a model learns to predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megapipe.config.notes import MUST, NAMED, Range, at_least, excludes, needs

FEW = Range("at least 0 and at most 100", lambda v: 0 <= v <= 100)
FURTHER = needs("mtp_num_layers", "tokens are predicted one ahead", least=1)


@dataclass(frozen=True)
class MTPConfig:
    """Depths behind the model's last layer, each a layer that predicts one token further. Usually there are none."""

    mtp_num_layers: Annotated[
        int | None,
        FEW,
        MUST,
        excludes(
            "enable_optimizer_post_validation",
            "{} does not go with {}: a depth's embedding and head come from their owners when an update is valid",
            where=lambda c: c.model.depths,
        ),
        excludes(
            "pipeline_slices",
            "{} does not go with {}: a depth is a pass of a whole microbatch",
            where=lambda c: c.model.depths,
        ),
    ] = None
    """Depths of multi-token prediction: layers behind the last one, of which each predicts a token further."""
    mtp_loss_scaling_factor: Annotated[float, at_least(0), NAMED, FURTHER] = 0.1
    """Weight of the mean of the depths' losses in what is trained."""
    mtp_within_documents: Annotated[bool, NAMED, FURTHER] = False
    """Depths learn no token of another document than they stand in. Default: they do, as Megatron-LM's. Not in
    Megatron-LM."""

    @property
    def depths(self) -> int:
        """The number of them."""
        return self.mtp_num_layers or 0

    @property
    def depth_weight(self) -> float:
        """The weight of the loss of each."""
        return self.mtp_loss_scaling_factor / max(self.depths, 1)
