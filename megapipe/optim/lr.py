"""Learning rate and weight decay as pure functions of the samples consumed, by Megatron's rules.

Everything is counted in samples (sequences), also where the user gave iterations: a run that resumes with another batch
size stays on its curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from megapipe.config import Config, TrainConfig
from megapipe.errors import ConfigError


@dataclass(frozen=True)
class WeightDecay:
    """Weight decay from start to end over `length` samples; `constant` is end."""

    start: float = 0.0
    end: float = 0.0
    style: str = "constant"
    length: int = 1

    @staticmethod
    def of(config: Config) -> WeightDecay:
        """The decay that the flags describe. Raises: ConfigError for flags that describe none."""
        train = config.train
        start, end, style = train.start_weight_decay, train.end_weight_decay, train.weight_decay_incr_style
        if style == "constant":
            return WeightDecay(train.weight_decay, train.weight_decay)
        if start is None or end is None:
            both = f"--start-weight-decay {start or 0:g} --end-weight-decay {end or train.weight_decay:g}"
            raise ConfigError(f"--weight-decay-incr-style {style} needs two ends, for example {both}")
        if start > end:
            raise ConfigError(
                f"--start-weight-decay {start:g} is above --end-weight-decay {end:g}, and weight decay only grows. "
                f"Use --start-weight-decay {end:g} --end-weight-decay {start:g}."
            )
        return WeightDecay(start, end, style, train.train_samples or config.train_iters * config.global_batch_size)

    def saved(self) -> float | list[float | str]:
        """The decay as a checkpoint keeps it: one number where it is constant."""
        return self.end if self.style == "constant" else [self.start, self.end, self.style, self.length]

    @staticmethod
    def loaded(saved: float | list[Any]) -> WeightDecay:
        """The decay that `saved` gave."""
        return WeightDecay(*saved) if isinstance(saved, list) else WeightDecay(saved, saved)


@dataclass(frozen=True)
class LRSchedule:
    """A curve: warm-up, then a style; and the weight decay beside it. Lengths in samples.

    Attributes:
        warmup: a fraction of `decay` need not be whole.
        decay: where the curve has come down to `min_lr`, warm-up included.
        wsd_style, wsd: shape and length of the last part of WSD.
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
        """The curve that the flags describe. Raises: ConfigError for flags that describe none."""
        train, batch = config.train, config.global_batch_size
        if train.train_samples is None:
            unit, decay = "iters", (train.lr_decay_iters or config.train_iters) * batch
            warmup, wsd = train.lr_warmup_iters * batch, (train.lr_wsd_decay_iters or 0) * batch
        else:
            unit, decay = "samples", train.lr_decay_samples or train.train_samples
            warmup, wsd = train.lr_warmup_samples, train.lr_wsd_decay_samples or 0
        fraction = train.lr_warmup_fraction
        assert train.lr is not None
        schedule = LRSchedule(
            train.lr,
            train.min_lr,
            train.lr_warmup_init,
            train.lr_decay_style,
            warmup if fraction is None else fraction * decay,
            decay,
            train.lr_wsd_decay_style,
            wsd,
            WeightDecay.of(config),
        )
        if problems := schedule._problems(unit):
            raise ConfigError(problems)
        return schedule

    def _problems(self, unit: str) -> list[str]:
        problems = []
        if self.warmup >= self.decay:
            problems.append(
                f"the learning rate warms up for {self.warmup:g} samples but decays until sample {self.decay}; "
                f"give a shorter warm-up or a longer --lr-decay-{unit}"
            )
        if self.style == "WSD" and not 0 < self.wsd <= self.decay:
            problems.append(
                f"--lr-decay-style WSD needs --lr-wsd-decay-{unit} between 1 and the length of the curve: "
                f"the last part has {self.wsd} of {self.decay} samples"
            )
        return problems


def learning_rate(schedule: LRSchedule, samples: int) -> float:
    """The rate of a step that starts after `samples` consumed samples, as Megatron-LM's OptimizerParamScheduler gives
    it (WSD: Hu et al. 2024, MiniCPM, sec. 4)."""
    s = schedule
    if s.warmup > 0 and samples <= s.warmup:
        return s.init_lr + (s.lr - s.init_lr) * samples / s.warmup
    if s.style == "constant":
        return s.lr
    if samples > s.decay:
        return s.min_lr
    if s.style == "inverse-square-root":
        return max(s.min_lr, s.lr * math.sqrt(max(s.warmup, 1)) / math.sqrt(max(samples, 1)))
    if s.style == "WSD":
        past = samples - (s.decay - s.wsd)
        height = 1.0 if past <= 0 else _fall(s.wsd_style, past / s.wsd)
    else:
        height = _fall(s.style, (samples - s.warmup) / (s.decay - s.warmup))
    return s.min_lr + height * (s.lr - s.min_lr)


def weight_decay(schedule: LRSchedule, samples: int) -> float:
    """The decay of a step that starts after `samples` samples, as Megatron-LM's OptimizerParamScheduler gives it."""
    d = schedule.weight_decay
    if d.style == "constant" or samples > d.length:
        return d.end
    grown = samples / d.length
    if d.style == "cosine":
        grown = (math.cos(math.pi * (1 - grown)) + 1) / 2
    return d.start + grown * (d.end - d.start)


def decoupled_rate(schedule: LRSchedule, samples: int, train: TrainConfig) -> float | None:
    """The rate of word embeddings and output head under --decoupled-lr: the same curve between other ends."""
    if train.decoupled_lr is None:
        return None
    low = schedule.min_lr if train.decoupled_min_lr is None else train.decoupled_min_lr
    return learning_rate(replace(schedule, lr=train.decoupled_lr, min_lr=low), samples)


def _fall(style: str, r: float) -> float:
    """A curve from 1 at r = 0 to 0 at r = 1."""
    if style == "linear":
        return 1 - r
    if style == "cosine":
        return (math.cos(math.pi * r) + 1) / 2
    if style == "exponential":
        return 2 * math.pow(0.5, r) - 1
    assert style == "minus_sqrt", style
    return 1 - math.sqrt(r)
