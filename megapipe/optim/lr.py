"""Compute learning rate and weight decay as functions of consumed samples, by Megatron's rules.

All lengths are in samples (sequences), also if the user gave iterations. A run that resumes with
another batch size therefore stays on its curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from megapipe.config import Config, OptimizerConfig
from megapipe.errors import ConfigError


@dataclass(frozen=True)
class WeightDecay:
    """A weight decay that grows from `start` to `end` over `length` samples.

    `of` makes the object from the flags. `saved` and `loaded` convert it for checkpoints.

    Attributes:
        start: the decay at the first step.
        end: the decay after `length` samples.
        style: "constant" (always `end`), "linear" or "cosine".
        length: number of samples.
    """

    start: float = 0.0
    end: float = 0.0
    style: str = "constant"
    length: int = 1

    @staticmethod
    def of(config: Config) -> WeightDecay:
        """Return the decay that the flags describe.

        Raises: ConfigError if a decay that is not constant lacks --start-weight-decay or
            --end-weight-decay, or if it would fall.
        """
        flags = config.optimizer
        start = flags.start_weight_decay
        end = flags.end_weight_decay
        style = flags.weight_decay_incr_style
        if style == "constant":
            return WeightDecay(flags.weight_decay, flags.weight_decay)
        if start is None or end is None:
            raise ConfigError(
                f"--weight-decay-incr-style {style} needs two ends, for example "
                f"--start-weight-decay {start or 0:g} "
                f"--end-weight-decay {end or flags.weight_decay:g}"
            )
        if start > end:
            raise ConfigError(
                f"--start-weight-decay {start:g} is above --end-weight-decay {end:g}, and weight "
                f"decay only grows. Use --start-weight-decay {end:g} --end-weight-decay {start:g}."
            )
        # Decay grows over the whole run, also where the learning rate's curve is shorter.
        length = config.batch.train_samples or config.train_iters * config.global_batch_size
        return WeightDecay(start, end, style, length)

    def saved(self) -> float | list[float | str]:
        """Return the decay in the form that a checkpoint holds.

        A constant decay is a number, any other the list [start, end, style, length].
        """
        if self.style == "constant":
            return self.end
        return [self.start, self.end, self.style, self.length]

    @staticmethod
    def loaded(saved: float | list[Any]) -> WeightDecay:
        """Return the decay from its JSON value in a checkpoint, the inverse of `saved`."""
        return WeightDecay(*saved) if isinstance(saved, list) else WeightDecay(saved, saved)


@dataclass(frozen=True)
class LRSchedule:
    """The learning rate over a run: a warm-up, then a curve. The object also has the weight decay.

    `of` makes the object from the flags.

    Attributes:
        lr: the rate after the warm-up.
        min_lr: the lowest rate after the warm-up.
        init_lr: the rate at the first step.
        style: the curve, a value of --lr-decay-style.
        warmup: length of the warm-up in samples, not always an integer.
        decay: number of samples, warm-up included, after which the curve has reached `min_lr`.
        wsd_style: with the style WSD (warmup-stable-decay), the curve of the decay at the end.
        wsd: length of that decay in samples.
        weight_decay: the weight decay.
    """

    lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    style: str = "linear"
    warmup: float = 0.0
    decay: int = 1
    wsd_style: str = "exponential"
    wsd: int = 0
    weight_decay: WeightDecay = WeightDecay()

    @staticmethod
    def of(config: Config) -> LRSchedule:
        """Return the schedule that the flags describe.

        Raises: ConfigError if the warm-up, or the decay at the end under WSD, is too long for the
            curve. Also for a weight decay that `WeightDecay.of` refuses.
        """
        flags = config.optimizer
        # With --train-samples, Megatron's flags for lengths end in -samples instead of -iters.
        if config.batch.train_samples is None:
            unit = "iters"
            batch = config.global_batch_size
            decay = (flags.lr_decay_iters or config.train_iters) * batch
            warmup: float = flags.lr_warmup_iters * batch
            wsd = (flags.lr_wsd_decay_iters or 0) * batch
        else:
            unit = "samples"
            decay = flags.lr_decay_samples or config.batch.train_samples
            warmup = flags.lr_warmup_samples
            wsd = flags.lr_wsd_decay_samples or 0
        # The fraction replaces the length, as in Megatron-LM, and is not rounded.
        if flags.lr_warmup_fraction is not None:
            warmup = flags.lr_warmup_fraction * decay
        assert flags.lr is not None
        schedule = LRSchedule(
            flags.lr,
            flags.min_lr,
            flags.lr_warmup_init,
            flags.lr_decay_style,
            warmup,
            decay,
            flags.lr_wsd_decay_style,
            wsd,
            WeightDecay.of(config),
        )
        problems = schedule._problems(unit)
        if problems:
            raise ConfigError(problems)
        return schedule

    def _problems(self, unit: str) -> list[str]:
        """Return a message for each length that is too long: a warm-up, or a decay at the end.

        Args:
            unit: "iters" or "samples", for flags in the messages such as --lr-decay-iters.
        """
        problems = []
        if self.warmup >= self.decay:
            problems.append(
                f"the learning rate warms up for {self.warmup:g} samples but decays until sample "
                f"{self.decay}; give a shorter warm-up or a longer --lr-decay-{unit}"
            )
        if self.style == "WSD" and not 0 < self.wsd <= self.decay:
            problems.append(
                f"--lr-decay-style WSD needs --lr-wsd-decay-{unit} between 1 and the length of the "
                f"curve: the last part has {self.wsd} of {self.decay} samples"
            )
        return problems


def learning_rate(schedule: LRSchedule, samples: int) -> float:
    """Return the learning rate of a step, as Megatron-LM's OptimizerParamScheduler does.

    The style WSD is described by Hu et al. 2024, MiniCPM, sec. 4.

    Args:
        samples: number of samples consumed before the step.
    """
    s = schedule
    # In Megatron-LM's order: the warm-up comes before every style, also the constant one.
    if s.warmup > 0 and samples <= s.warmup:
        return s.init_lr + (s.lr - s.init_lr) * samples / s.warmup
    if s.style == "constant":
        return s.lr
    if samples > s.decay:
        return s.min_lr
    # Continuous at the end of the warm-up, where both square roots are equal.
    if s.style == "inverse-square-root":
        # Both may be 0, in a run without a warm-up and in its first step.
        return max(s.min_lr, s.lr * math.sqrt(max(s.warmup, 1)) / math.sqrt(max(samples, 1)))
    if s.style == "WSD":
        # Constant until the last part begins.
        past = samples - (s.decay - s.wsd)
        height = 1.0 if past <= 0 else _fall(s.wsd_style, past / s.wsd)
    else:
        height = _fall(s.style, (samples - s.warmup) / (s.decay - s.warmup))
    return s.min_lr + height * (s.lr - s.min_lr)


def weight_decay(schedule: LRSchedule, samples: int) -> float:
    """Return the weight decay of a step, as Megatron-LM's OptimizerParamScheduler does.

    Args:
        samples: number of samples consumed before the step.
    """
    d = schedule.weight_decay
    if d.style == "constant" or samples > d.length:
        return d.end
    grown = samples / d.length
    # The rising half of a cosine; Megatron-LM's "linear" needs no change.
    if d.style == "cosine":
        grown = (math.cos(math.pi * (1 - grown)) + 1) / 2
    return d.start + grown * (d.end - d.start)


def decoupled_rate(schedule: LRSchedule, samples: int, flags: OptimizerConfig) -> float | None:
    """Return the learning rate of word embeddings and output head; None without --decoupled-lr.

    The rate follows the curve of `schedule`, between --decoupled-lr and --decoupled-min-lr. Without
    the second flag the lowest rate is the schedule's.

    Args:
        samples: number of samples consumed before the step.
        flags: the optimizer's flags.
    """
    if flags.decoupled_lr is None:
        return None
    # Also with a curve from a checkpoint, whose lowest rate then counts.
    low = schedule.min_lr if flags.decoupled_min_lr is None else flags.decoupled_min_lr
    return learning_rate(replace(schedule, lr=flags.decoupled_lr, min_lr=low), samples)


def _fall(style: str, r: float) -> float:
    """Return the height of a curve that falls from 1 at r = 0 to 0 at r = 1.

    style: "linear", "cosine", "exponential" or "minus_sqrt".
    """
    if style == "linear":
        return 1 - r
    if style == "cosine":
        return (math.cos(math.pi * r) + 1) / 2
    # Megatron-LM's formula, which is 1 at r = 0 and 0 at r = 1.
    if style == "exponential":
        return 2 * math.pow(0.5, r) - 1
    assert style == "minus_sqrt", style
    return 1 - math.sqrt(r)
