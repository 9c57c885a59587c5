"""The learning-rate curves at points computed by hand from Megatron's rules, and at every boundary."""

import math
from dataclasses import replace

import pytest

from megapipe.config import Config, OptimizerConfig
from megapipe.errors import ConfigError
from megapipe.optim.lr import LRSchedule, WeightDecay, decoupled_rate, learning_rate, weight_decay

CURVE = LRSchedule(lr=1.0, min_lr=0.1, warmup=100, decay=1100)


@pytest.mark.parametrize(("samples", "lr"), [(0, 0.2), (50, 0.6), (100, 1.0)])
def test_warm_up_is_a_line_from_its_initial_rate(samples, lr):
    assert learning_rate(replace(CURVE, init_lr=0.2), samples) == pytest.approx(lr, rel=1e-15)


@pytest.mark.parametrize(
    ("style", "samples", "lr"),
    [
        ("constant", 101, 1.0),
        ("constant", 5000, 1.0),
        ("linear", 350, 0.1 + 0.9 * 0.75),
        ("linear", 1100, 0.1),
        ("cosine", 350, 0.1 + 0.9 * (math.sqrt(0.5) + 1) / 2),
        ("cosine", 600, 0.55),
        ("cosine", 1100, 0.1),
        ("inverse-square-root", 400, 0.5),
        ("inverse-square-root", 1100, math.sqrt(1 / 11)),
        ("linear", 1101, 0.1),
        ("cosine", 9999, 0.1),
        ("inverse-square-root", 1101, 0.1),
    ],
)
def test_styles(style, samples, lr):
    assert learning_rate(replace(CURVE, style=style), samples) == pytest.approx(lr, rel=1e-15)


@pytest.mark.parametrize(
    ("wsd_style", "quarter"),
    [
        ("linear", 0.75),
        ("cosine", (math.sqrt(0.5) + 1) / 2),
        ("exponential", 2 * 0.5**0.25 - 1),
        ("minus_sqrt", 0.5),
    ],
)
def test_wsd_is_flat_and_then_falls(wsd_style, quarter):
    curve = replace(CURVE, style="WSD", wsd_style=wsd_style, wsd=400)
    assert learning_rate(curve, 101) == learning_rate(curve, 700) == 1.0
    assert learning_rate(curve, 800) == pytest.approx(0.1 + 0.9 * quarter, rel=1e-15)
    assert learning_rate(curve, 1100) == pytest.approx(0.1, rel=1e-12)
    assert learning_rate(curve, 1101) == 0.1


def test_without_warm_up_the_first_step_has_the_peak():
    assert learning_rate(replace(CURVE, warmup=0), 0) == 1.0
    assert learning_rate(replace(CURVE, warmup=0, style="inverse-square-root"), 0) == 1.0


def test_inverse_square_root_never_falls_below_the_minimum():
    assert learning_rate(replace(CURVE, warmup=1, style="inverse-square-root"), 900) == 0.1


def config(**fields):
    return Config().with_fields(micro_batch_size=2, global_batch_size=8, lr=1e-3, **fields)


def test_iterations_are_counted_in_samples():
    schedule = LRSchedule.of(config(train_iters=100, lr_warmup_iters=5, lr_decay_style="WSD", lr_wsd_decay_iters=10))
    assert (schedule.warmup, schedule.decay, schedule.wsd) == (40, 800, 80)
    assert LRSchedule.of(config(train_iters=100, lr_decay_iters=50)).decay == 400


def test_samples_are_taken_as_they_are():
    schedule = LRSchedule.of(config(train_samples=1000, lr_warmup_samples=30))
    assert (schedule.warmup, schedule.decay) == (30, 1000)
    assert LRSchedule.of(config(train_samples=1000, lr_decay_samples=600)).decay == 600


def test_the_fraction_is_one_of_the_decay_and_not_rounded():
    schedule = LRSchedule.of(config(train_iters=100, lr_decay_iters=9, lr_warmup_fraction=0.01))
    assert schedule.warmup == pytest.approx(0.72)


def test_a_curve_that_cannot_be():
    with pytest.raises(ConfigError) as caught:
        LRSchedule.of(config(train_iters=10, lr_warmup_iters=10, lr_decay_style="WSD"))
    assert caught.value.problems == (
        "the learning rate warms up for 80 samples but decays until sample 80; "
        "give a shorter warm-up or a longer --lr-decay-iters",
        "--lr-decay-style WSD needs --lr-wsd-decay-iters between 1 and the length of the curve: "
        "the last part has 0 of 80 samples",
    )


def test_the_decoupled_rate_has_the_same_curve_between_its_own_ends():
    assert decoupled_rate(CURVE, 600, OptimizerConfig()) is None
    assert decoupled_rate(CURVE, 600, OptimizerConfig(decoupled_lr=3.0, decoupled_min_lr=1.0)) == pytest.approx(2.0)
    assert decoupled_rate(CURVE, 600, OptimizerConfig(decoupled_lr=3.0)) == pytest.approx(0.1 + 0.5 * 2.9)
    assert decoupled_rate(CURVE, 50, OptimizerConfig(decoupled_lr=3.0)) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("style", "samples", "decay"),
    [
        ("linear", 0, 0.1),
        ("linear", 100, 0.2),
        ("linear", 400, 0.5),
        ("linear", 401, 0.5),
        ("cosine", 0, 0.1),
        ("cosine", 100, 0.1 + 0.4 * (1 - math.sqrt(0.5)) / 2),
        ("cosine", 200, 0.3),
        ("cosine", 400, 0.5),
        ("cosine", 9999, 0.5),
        ("constant", 100, 0.5),
    ],
)
def test_weight_decay_grows_from_start_to_end(style, samples, decay):
    curve = replace(CURVE, weight_decay=WeightDecay(0.1, 0.5, style, 400))
    assert weight_decay(curve, samples) == pytest.approx(decay, rel=1e-15)


def test_weight_decay_grows_over_the_whole_run_whatever_the_learning_rate_does():
    grows = {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.0, "end_weight_decay": 0.1}
    by_iterations = LRSchedule.of(config(train_iters=100, lr_decay_iters=50, **grows))
    assert by_iterations.weight_decay == WeightDecay(0.0, 0.1, "cosine", 800)
    assert LRSchedule.of(config(train_samples=1000, **grows)).weight_decay.length == 1000
    assert LRSchedule.of(config(train_iters=9, weight_decay=0.3)).weight_decay == WeightDecay(0.3, 0.3)
    for decay in (by_iterations.weight_decay, WeightDecay(0.3, 0.3)):
        assert WeightDecay.loaded(decay.saved()) == decay
