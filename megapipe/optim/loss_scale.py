"""Scale the loss so that fp16 gradients stay representable (Micikevicius et al. 2018, section 3.2).

fp16 represents magnitudes from 6e-8 to 65504. When a gradient overflows, the step is skipped and,
after some of these, the scale is halved. After a number of steps without overflow it is doubled.
The rule and its names are Megatron-LM's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megapipe.config import PrecisionConfig


@dataclass(frozen=True)
class LossScale:
    """The factor on the loss, and the counters that decide on the next factor.

    `start` returns the first value of a run, and `after` the value after a step.

    Attributes:
        scale: the factor. Losses are multiplied by the scale before backward, and gradients are
            divided by it afterwards.
        dynamic: whether the scale changes; otherwise the counters are unused.
        good_steps: number of steps without overflow since the last overflow or doubling.
        overflows_left: number of overflows until the scale is halved; at 0 each overflow halves it.
            Only a doubling sets it back to --hysteresis.
    """

    scale: float = 1.0
    dynamic: bool = False
    good_steps: int = 0
    overflows_left: int = 0

    @staticmethod
    def start(precision: PrecisionConfig) -> LossScale:
        """Return the scale at the beginning of a run.

        The scale is --loss-scale if given; else with --fp16 --initial-loss-scale; else 1.
        """
        if not precision.dynamic_loss_scale:
            # Without fp16 it multiplies by 1, which changes no bit.
            return LossScale(precision.loss_scale or 1.0)
        return LossScale(precision.initial_loss_scale, True, overflows_left=precision.hysteresis)

    def after(self, overflow: bool, precision: PrecisionConfig) -> LossScale:
        """Return the scale and counters after a step with or without overflow.

        `precision` has the settings of the scale, such as --min-loss-scale, its least value.
        """
        if not self.dynamic:
            return self
        if overflow:
            left = max(self.overflows_left - 1, 0)
            scale = self.scale
            # Once there are none left, every further overflow halves the scale.
            if not left:
                scale = max(self.scale / 2, precision.min_loss_scale)
            return LossScale(scale, True, 0, left)
        # The step that fills the window doubles the scale and starts a new window.
        if self.good_steps + 1 < precision.loss_scale_window:
            return replace(self, good_steps=self.good_steps + 1)
        return LossScale(self.scale * 2, True, 0, precision.hysteresis)
