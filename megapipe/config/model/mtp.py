"""Multi-token prediction: how many tokens ahead a model learns to predict.

DeepSeek-AI, DeepSeek-V3 Technical Report (2024), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megapipe.config.notes import FROM_0, MUST, NAMED, Range, excludes, needs

FEW = Range("at least 0 and at most 100", lambda v: 0 <= v <= 100)
FURTHER = needs("mtp_num_layers", "tokens are predicted one ahead", least=1)


@dataclass(frozen=True)
class MTPConfig:
    """Layers after the model's last layer that each predict one token further. Default: none."""

    mtp_num_layers: Annotated[
        int | None,
        FEW,
        MUST,
        excludes(
            "enable_optimizer_post_validation",
            "{} does not go with {}: "
            "a depth's embedding and head come from their owners when an update is valid",
            where=lambda c: c.model.depths,
        ),
        excludes(
            "pipeline_slices",
            "{} does not go with {}: a depth is a pass of a whole microbatch",
            where=lambda c: c.model.depths,
        ),
    ] = None
    """Depths of multi-token prediction. Each is a layer after the last one and predicts one token
    further ahead, which adds a term to the loss. Default: none."""
    mtp_loss_scaling_factor: Annotated[float, FROM_0, NAMED, FURTHER] = 0.1
    """Weight of the multi-token loss, the mean over the depths, in the loss that is trained."""
    mtp_within_documents: Annotated[bool, NAMED, FURTHER] = False
    """Compute a depth's loss only where its target is in the same document. Default: targets may
    be in the next document, as in Megatron-LM. Not in Megatron-LM."""

    @property
    def depths(self) -> int:
        """The number of modules (depths) of multi-token prediction, one for each further token."""
        return self.mtp_num_layers or 0

    @property
    def depth_weight(self) -> float:
        """The factor of the loss of one module of multi-token prediction in the whole loss."""
        # Megatron-LM's mean over the depths. 1 without depths, where nothing is weighed.
        return self.mtp_loss_scaling_factor / max(self.depths, 1)
