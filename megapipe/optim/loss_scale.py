"""The factor on the loss that keeps fp16 gradients representable (Micikevicius et al. 2018, section 3.2).

fp16 ends at 6e-8 below and at 65504 above. The factor is halved when a gradient overflows, whose step is then skipped,
and doubled after a while without; the rule and its names are Megatron-LM's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megapipe.config import TrainConfig


@dataclass(frozen=True)
class LossScale:
    """The factor now, and what decides on the next one.

    Attributes:
        scale: losses are multiplied by it before, gradients divided after backward.
        dynamic: the others count only then.
        good_steps: without overflow, one after another.
        overflows_left: the scale is lowered when there are none; refilled when it grows, not by good steps.
    """

    scale: float = 1.0
    dynamic: bool = False
    good_steps: int = 0
    overflows_left: int = 0

    @staticmethod
    def start(train: TrainConfig) -> LossScale:
        """The scale at the beginning of a run: --loss-scale, with --fp16 --initial-loss-scale, else 1."""
        if not train.dynamic_loss_scale:
            return LossScale(train.loss_scale or 1.0)
        return LossScale(train.initial_loss_scale, True, overflows_left=train.hysteresis)

    def after(self, overflow: bool, train: TrainConfig) -> LossScale:
        """The state for the step that follows one with or without overflow."""
        if not self.dynamic:
            return self
        if overflow:
            left = max(self.overflows_left - 1, 0)
            scale = self.scale if left else max(self.scale / 2, train.min_loss_scale)
            return LossScale(scale, True, 0, left)
        if self.good_steps + 1 < train.loss_scale_window:
            return replace(self, good_steps=self.good_steps + 1)
        return LossScale(self.scale * 2, True, 0, train.hysteresis)
