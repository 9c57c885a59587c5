"""Describe every number that is logged in one row: its computation, line, board tag and JSON key.

For a board and --metrics-file a row is computed from one step, for a line from the steps since the
last line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megapipe.config import Config
from megapipe.distributed.device import memory_bytes
from megapipe.training.report.moment import Moment
from megapipe.training.report.values import (
    again,
    brief,
    bubble,
    busiest_load,
    copies,
    exposed,
    exposed_copies,
    exposed_text,
    highest,
    most_exposed,
    parts,
    peaks,
    per_layer,
    ranks,
    slow_texts,
    speed,
    stage_ms,
    stages,
)

PREFIX = "megapipe/"
"""The prefix of tags that Megatron-LM does not have."""


@dataclass(frozen=True)
class Number:
    """One logged number: how it is computed, and how each output shows it.

    The value is a number, a (measured, predicted) pair, several values for one text, or {name:
    value}. An output whose attribute is empty does not show the number.

    Attributes:
        of: computes the value from a Moment; returns None if a step has no such number.
        line: format of the number in Megatron-LM's line.
        short: (rank of importance in the short line, function that formats the value); None to
            leave it out. A number with a negative rank is never cut off.
        tag: tag in TensorBoard and Weights & Biases, every --tensorboard-log-interval.
        line_tag: the same kind of tag, written with each line.
        key: key in --metrics-file.
        null: whether --metrics-file has null for a step without this number.
        asked: returns whether the flags ask for the number.
    """

    of: Callable[[Any], Any]
    line: str = ""
    short: tuple[int, Callable[[Any], str]] | None = None
    tag: str = ""
    line_tag: str = ""
    key: str = ""
    null: bool = True
    asked: Callable[[Config], object] = lambda config: True


# Megatron-LM has no such numbers, so names and places are ours.
PASSES = (
    Number(lambda now: now.steps, key="steps"),
    Number(
        lambda now: (now.passes * 1e3, now.predicted_passes * 1e3),
        "passes (ms): {:.1f}, predicted {:.1f}",
        line_tag=f"{PREFIX}passes-ms",
        key="passes_ms",
    ),
    Number(
        lambda now: (now.bubble, now.predicted_bubble),
        line_tag=f"{PREFIX}bubble",
        key="bubble",
    ),
    Number(
        bubble,
        "bubble: {:z.1%} ({}), predicted bubble by {}: {:z.1%}",
        short=(4, lambda x: f"bubble {x[0]:z.0%} (by {x[2].split()[-1]} {x[3]:.0%})"),
    ),
    Number(parts, line_tag=f"{PREFIX}bubble-of-{{}}", key="bubble_parts"),
    Number(again, key="by_measured_passes", null=False),
    Number(exposed_text, "exposed communication: {}"),
    Number(exposed, line_tag=f"{PREFIX}exposed-communication", key="exposed_communication"),
    Number(copies, key="copies_ms", null=False),
    Number(
        exposed_copies,
        line_tag=f"{PREFIX}exposed-copies-ms",
    ),
    Number(
        most_exposed,
        "copies of rank {} (ms): {:.1f} out, {:.1f} back, {:.1f} exposed, "
        "predicted: {:.1f}, {:.1f}, {:.1f}",
    ),
    Number(stages, key="stages_ms"),
    Number(stage_ms, line_tag=f"{PREFIX}stage-{{}}-ms"),
    Number(ranks, key="ranks_ms"),
    Number(peaks, key="peak_gib"),
    Number(highest, "peak memory (GiB): {:.2f} on rank {}, predicted {:.2f}"),
)
"""The numbers of Measured."""


def _of_passes(row: Number) -> Number:
    """Return a `Number` computed from a Moment, given one computed from its Measured.

    The value is None before anything was measured.

    Args:
        row: the number whose `of` takes a Measured.
    """
    return replace(row, of=lambda s: None if s.now is None else row.of(s.now), null=False)


NUMBERS = (
    # Megatron-LM's fields in its order.
    Number(lambda s: s.progress.iteration, key="iteration"),
    Number(
        lambda s: s.progress.consumed_train_samples,
        "consumed samples: {:12d}",
        key="consumed_samples",
    ),
    Number(
        lambda s: s.seconds * 1e3,
        "elapsed time per iteration (ms): {:.1f}",
        short=(1, lambda ms: f"{ms:5.0f} ms" if ms >= 100 else f"{ms:5.3g} ms"),
        key="step_ms",
    ),
    Number(lambda s: s.seconds, line_tag="iteration-time"),
    Number(
        lambda s: s.tflops,
        "throughput per GPU (TFLOP/s/GPU): {:.1f}",
        short=(-3, "{:.3g} TFLOP/s".format),
        line_tag="throughput",
        asked=lambda c: c.log.log_throughput,
    ),
    # Already the rate of the next iteration, as in Megatron-LM.
    Number(
        lambda s: s.lr,
        "learning rate: {:.6E}",
        (7, "lr {:.2e}".format),
        tag="learning-rate",
        key="learning_rate",
    ),
    Number(lambda s: s.result.batch, "global batch size: {:5d}", tag="batch-size", key="batch"),
    Number(lambda s: s.over.losses, "{}: {:.6E}", tag="{}", key="losses"),
    Number(per_layer, tag="moe/{}", asked=lambda c: c.log.moe_per_layer_logging),
    Number(
        lambda s: s.result.routed.tokens,
        key="tokens_per_expert",
        asked=lambda c: c.log.moe_per_layer_logging,
    ),
    Number(
        lambda s: s.progress.loss_scale.scale,
        "loss scale: {:.1f}",
        tag="loss-scale",
        key="loss_scale",
    ),
    Number(
        lambda s: s.result.grad_norm,
        "grad norm: {:.3f}",
        (6, "norm {:.2f}".format),
        tag="grad-norm",
        key="grad_norm",
    ),
    Number(
        lambda s: s.result.num_zeros,
        "num zeros: {}",
        (-2, "zeros {}".format),
        tag="num-zeros",
        key="num_zeros",
    ),
    Number(
        lambda s: s.params_norm,
        "params norm: {:.3f}",
        (-1, "params norm {:.3f}".format),
        tag="params-norm",
        key="params_norm",
    ),
    Number(lambda s: s.result.skipped, key="skipped"),
    Number(lambda s: s.over.skipped, "number of skipped iterations: {:3d}"),
    Number(lambda s: s.over.nan, "number of nan iterations: {:3d}"),
    # Our own fields.
    Number(
        lambda s: (s.over.guessed, s.over.undone),
        "updates ahead of the norm: {:3d} | updates undone: {:3d}",
        asked=lambda c: c.parallel.enable_optimizer_post_validation,
    ),
    Number(
        lambda s: s.tokens_per_second,
        "tokens per second: {:.0f}",
        short=(2, lambda x: f"{brief(x):>5} tok/s"),
        line_tag=f"{PREFIX}tokens-per-second",
        key="tokens_per_second",
    ),
    Number(speed, "{} per device: {:.4g}", asked=lambda c: not c.log.log_throughput),
    Number(lambda s: s.tflops, line_tag=f"{PREFIX}tflops-per-device", key="tflops_per_device"),
    Number(
        lambda s: s.result.routed.busiest,
        "busiest expert: {:.2f} x the mean of layer {}",
        (8, lambda most: f"busiest expert {most[0]:.2f}"),
    ),
    Number(
        busiest_load,
        tag=f"{PREFIX}busiest-expert",
        key="busiest_expert",
        null=False,
    ),
    Number(
        lambda s: s.mfu,
        "MFU: {:.1%}",
        (3, "MFU {:3.0%}".format),
        line_tag=f"{PREFIX}mfu",
        key="mfu",
    ),
    *map(_of_passes, PASSES),
    Number(slow_texts, key="slow", null=False),
    Number(
        lambda s: s.config.world_size,
        tag="world-size",
        asked=lambda c: c.log.log_world_size_to_tensorboard,
    ),
    Number(
        lambda s: memory_bytes(s.counters.mesh.device),
        tag="{}",
        asked=lambda c: c.log.log_memory_to_tensorboard,
    ),
    Number(lambda s: s.remaining, "time remaining: {}", (5, "left {}".format)),
)
"""All numbers in the order of the line; our own follow Megatron-LM's."""


def fields(rows: Sequence[Number], moment: Any) -> Iterator[str]:
    """Yield the text of each number that is not None; one text for each item of a dict.

    Args:
        rows: the numbers.
        moment: a Moment, or a Measured for the numbers in PASSES.
    """
    # A row is computed only if it is printed: some rows simulate the table.
    for row in rows:
        if not row.line:
            continue
        value = row.of(moment)
        if value is None:
            continue
        if isinstance(value, Mapping):
            for pair in value.items():
                yield row.line.format(*pair)
        elif isinstance(value, tuple):
            yield row.line.format(*value)
        else:
            yield row.line.format(value)


def scalars(moment: Moment, *, line: bool) -> dict[str, float]:
    """Return {tag: value} for TensorBoard and Weights & Biases.

    Args:
        moment: the values to report.
        line: True for the scalars that go with each line of the log, False for the scalars of every
            step.
    """
    found: dict[str, float] = {}
    for row in asked(moment.config):
        tag = row.line_tag if line else row.tag
        if not tag:
            continue
        value = row.of(moment)
        if isinstance(value, Mapping):
            found |= {tag.format(name): x for name, x in value.items()}
        elif value is not None:
            found |= _paired(tag, f"{tag}-predicted", value)
    return found


def as_json(moment: Moment) -> dict[str, Any]:
    """Return {key: value} for --metrics-file.

    Args:
        moment: the state of the run to report.
    """
    found: dict[str, Any] = {}
    for row in asked(moment.config):
        if not row.key:
            continue
        value = row.of(moment)
        if value is not None or row.null:
            found |= _paired(row.key, f"predicted_{row.key}", value)
    return found


def asked(config: Config) -> list[Number]:
    """Return the entries of `NUMBERS` whose values the flags ask for."""
    return [row for row in NUMBERS if row.asked(config)]


def _paired(name: str, predicted: str, value: Any) -> dict[str, Any]:
    """Return {name: value}; for a (measured, predicted) pair {name: ..., predicted: ...}.

    predicted: the key of the prediction.
    """
    # A tuple is a (measured, predicted) pair.
    if not isinstance(value, tuple):
        return {name: value}
    return dict(zip((name, predicted), value, strict=True))
