"""What a run tells: Megatron's iteration line letter for letter, its TensorBoard tags, validation, arguments.

Tools read these lines by field name, so fields of our own stand behind the last of Megatron's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from megapipe.config import Config, LogConfig
from megapipe.plan import GIB
from megapipe.training.report.counters import Measured


@dataclass(frozen=True)
class IterationReport:
    """The numbers of one line, means over the iterations since the last.

    Attributes:
        losses: mean of each loss; one that is not a number is printed too.
        tflops: model TFLOP/s per device, if asked for.
        tokens_per_second: of the whole run.
        late: updates that did not wait for the norm, and those of them that were undone.
        device_tflops: model TFLOP/s per device. mfu: as a share of its peak, where that is known.
        now: the passes of the last steps.
        remaining: seconds to the end of the run at this speed, where somebody watches a terminal.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    elapsed_ms: float
    learning_rate: float
    global_batch_size: int
    losses: Mapping[str, float]
    loss_scale: float
    grad_norm: float | None
    num_zeros: int | None
    params_norm: float | None
    skipped: int
    nan: int
    late: tuple[int, int] | None
    tflops: float | None
    tokens_per_second: float
    device_tflops: float
    mfu: float | None
    now: Measured | None
    remaining: float | None = None


def short_line(report: IterationReport) -> str:
    """The same in 80 characters, and as many more as metrics of one's own behind the loss take."""
    r = report
    main = "lm loss" if "lm loss" in r.losses else next(iter(r.losses), None)
    loss = "-" if main is None else f"{r.losses[main]:.4f}"
    own = "".join(f" {name} {value:.4g}" for name, value in r.losses.items() if name != main)
    parts = [f"{r.iteration}/{r.train_iters}", f"loss {loss}{own}", f"{_brief(r.elapsed_ms)} ms"]
    parts += [f"{_brief(r.tokens_per_second)} tok/s"]
    parts += [] if r.remaining is None else [f"left {_clock(r.remaining)}"]
    parts += [] if r.mfu is None else [f"MFU {r.mfu:.0%}"]
    parts += [] if r.now is None else [f"bubble {r.now.bubble:.0%}"]
    parts += [] if r.grad_norm is None else [f"norm {r.grad_norm:.2f}"]
    parts.append(f"lr {r.learning_rate:.2e}")
    fit = sum(len(" ".join(parts[: n + 1])) <= 80 + len(own) for n in range(len(parts)))
    return " ".join(parts[:fit])


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _brief(x: float) -> str:
    """Three digits and a letter."""
    for letter in ("", "k", "M", "G"):
        if x < 999.5:
            return f"{x:.3g}{letter}"
        x /= 1000
    return f"{x:.3g}T"


def iteration_line(report: IterationReport, now: datetime) -> str:
    """Megatron-LM's line (training_log), then our own fields."""
    r = report
    parts = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {r.iteration:8d}/{r.train_iters:8d} |",
        f" consumed samples: {r.consumed_samples:12d} |",
        f" elapsed time per iteration (ms): {r.elapsed_ms:.1f} |",
    ]
    if r.tflops is not None:
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {r.tflops:.1f} |")
    parts.append(f" learning rate: {r.learning_rate:.6E} |")
    parts.append(f" global batch size: {r.global_batch_size:5d} |")
    parts += [f" {name}: {value:.6E} |" for name, value in r.losses.items()]
    parts.append(f" loss scale: {r.loss_scale:.1f} |")
    if r.grad_norm is not None:
        parts.append(f" grad norm: {r.grad_norm:.3f} |")
    if r.num_zeros is not None:
        parts.append(f" num zeros: {r.num_zeros} |")
    if r.params_norm is not None:
        parts.append(f" params norm: {r.params_norm:.3f} |")
    parts.append(f" number of skipped iterations: {r.skipped:3d} |")
    parts.append(f" number of nan iterations: {r.nan:3d} |")
    if r.late is not None:
        parts.append(f" updates ahead of the norm: {r.late[0]:3d} | updates undone: {r.late[1]:3d} |")
    parts.append(f" tokens per second: {r.tokens_per_second:.0f} |")
    if r.tflops is None:
        parts.append(f" TFLOP/s per device: {r.device_tflops:.4g} |")
    if r.mfu is not None:
        parts.append(f" MFU: {r.mfu:.1%} |")
    if r.now is not None:
        parts += passes_fields(r.now)
    if r.remaining is not None:
        parts.append(f" time remaining: {_clock(r.remaining)} |")
    return "".join(parts)


def passes_fields(now: Measured) -> Iterator[str]:
    """What was measured beside its prediction; the parts of the bubble, which add up to it: see LEGEND."""
    yield f" passes (ms): {now.passes * 1e3:.1f}, predicted {now.predicted_passes * 1e3:.1f} |"
    if len(now.ranks) > 1:
        rest = "residual" if round(now.of_messages, 3) < 0 else "messages"
        named = {"table": now.of_table, "stages": now.of_stages, "host": now.of_host, rest: now.of_messages}
        parts = ", ".join(f"{name} {x:z.1%}" for name, x in named.items())
        yield f" bubble: {now.bubble:z.1%} ({parts}), predicted bubble: {now.predicted_bubble:z.1%} |"
    if now.peak_bytes:
        held, most = max((x, rank) for rank, x in enumerate(now.peak_bytes))
        yield f" peak memory (GiB): {held / GIB:.2f} on rank {most}, predicted {now.predicted_peaks[most] / GIB:.2f} |"


LEGEND = """\
bubble: the share of the passes' time in which the rank that waits most computes nothing, the sum of
  table     what the schedule leaves open where all stages take the same
  stages    what stages of unlike times add; below 0 where they fit the schedule better
  host      the time between two passes
  messages  the rest, waiting for messages; called residual below 0, where less was waited than the parts above come
            to, which are simulated from the median time of each pass"""
"""Told once, for `passes_fields`."""


def validation_lines(prefix: str, losses: Mapping[str, float], samples: range) -> str:
    """The validation result between two rules of dashes; behind Megatron-LM's fields the samples that it is of."""
    text = f" validation loss at {prefix} | " + "".join(
        f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | " for name, loss in losses.items()
    )
    text += f"samples: {samples.start} to {samples.stop - 1} | "
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"


def perplexity(loss: float) -> float:
    """exp(loss), capped as Megatron's at exp(20)."""
    return math.exp(min(20.0, loss))


def arguments(config: Config) -> str:
    """The settings that differ from their defaults, sorted without case."""
    settings = [(f, getattr(group, f.name)) for group in config.sections for f in fields(group)]
    values = {f.name: value for f, value in settings if value != f.default}
    others = f"  {len(settings) - len(values)} others have their defaults, see --help"
    values["world_size"] = config.world_size
    values["data_parallel_size"] = config.data_parallel_size
    rows = [f"  {name} ".ljust(50, ".") + f" {values[name]}" for name in sorted(values, key=str.lower)]
    dashes = "-" * 24
    return "\n".join([f"{dashes} arguments {dashes}", *rows, others, f"{'-' * 20} end of arguments {'-' * 21}"])


def banner(title: str, *lines: str) -> str:
    """What nobody should overlook."""
    rule = "=" * 24
    return "\n  ".join([f"{rule} {title} {rule}", *lines]) + "\n" + "=" * (50 + len(title))


class TensorBoard:
    """Scalars under Megatron's tags, by iteration and by samples. Does nothing without --tensorboard-dir.

    A folder that cannot be written to, from the start or from some day on, costs one warning, never the run.
    """

    def __init__(self, log: LogConfig) -> None:
        self._writer: Any = None
        self._folder = log.tensorboard_dir
        if self._folder is not None:
            from torch.utils.tensorboard import SummaryWriter  # a tenth of a second, for those who ask

            with self._warning():
                self._writer = SummaryWriter(self._folder, max_queue=log.tensorboard_queue_size)

    def scalars(self, values: Mapping[str, float | None], iteration: int, samples: int | None = None) -> None:
        """Write those that are there, each also against samples if these are given."""
        with self._warning():
            for tag, value in values.items():
                if value is not None and self._writer is not None:
                    self._writer.add_scalar(tag, value, iteration)
                    if samples is not None:
                        self._writer.add_scalar(f"{tag} vs samples", value, samples)

    def close(self) -> None:
        """Flush."""
        with self._warning():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # also what the writer's thread met since the last call
            self._writer = None
            print(f"WARNING: no TensorBoard logs from here on, --tensorboard-dir {self._folder}: {error}", flush=True)
