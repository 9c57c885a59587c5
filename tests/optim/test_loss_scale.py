"""The dynamic loss scale against Megatron-LM's rule, and what it does to a training."""

from __future__ import annotations

from megapipe.config import PrecisionConfig
from megapipe.optim.loss_scale import LossScale

FP16 = PrecisionConfig(fp16=True, initial_loss_scale=64.0, min_loss_scale=16.0, loss_scale_window=3, hysteresis=2)


def scales(overflows: str, precision: PrecisionConfig = FP16) -> list[float]:
    """The scale after each step; x stands for an overflow."""
    state, found = LossScale.start(precision), []
    for overflow in overflows:
        state = state.after(overflow == "x", precision)
        found.append(state.scale)
    return found


def test_the_scale_doubles_after_a_window_without_overflow():
    assert scales("......") == [64, 64, 128, 128, 128, 256]


def test_an_overflow_starts_the_window_anew():
    assert scales("..x...") == [64, 64, 64, 64, 64, 128]


def test_hysteresis_lets_one_overflow_pass_then_each_one_halves_down_to_the_least():
    assert scales("xxxx") == [64, 32, 16, 16]


def test_good_steps_do_not_refill_the_hysteresis_but_growth_does():
    assert scales("x.x.x") == [64, 64, 32, 32, 16]
    assert scales("x...xx") == [64, 64, 64, 128, 128, 64]


def test_a_given_scale_stays_and_without_fp16_it_is_one():
    assert scales("xxxx....", PrecisionConfig(fp16=True, loss_scale=8.0)) == [8.0] * 8
    assert scales("xxxx....", PrecisionConfig()) == [1.0] * 8
