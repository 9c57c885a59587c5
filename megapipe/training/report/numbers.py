"""Every number that is logged, a row each: how it is computed, how a line says it, its tag on a board, its JSON key.

A row is computed of one step, for a board and --metrics-file, or of the steps since the last line, for the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megapipe.config import Config
from megapipe.distributed.device import memory_bytes
from megapipe.plan import GIB
from megapipe.training.report.counters import Measured
from megapipe.training.report.moment import Moment

PREFIX = "megapipe/"
"""The beginning of tags that are not Megatron-LM's."""


@dataclass(frozen=True)
class Number:
    """A number, a pair of what was measured and what was predicted, or several by name.

    Attributes:
        of: how it is computed; it returns None where a step has no such number.
        line: its field of Megatron-LM's line, a format.
        short: its place in the short line, and its text there. A negative place is never cut off.
        tag: on a board, every --tensorboard-log-interval. line_tag: on a board, with each line.
        key: in --metrics-file. null: write null there for a step that has no such number.
        asked: do the flags ask for it?
    """

    of: Callable[[Any], Any]
    line: str = ""
    short: tuple[int, Callable[[Any], str]] | None = None
    tag: str = ""
    line_tag: str = ""
    key: str = ""
    null: bool = True
    asked: Callable[[Config], object] = lambda config: True


def brief(x: float) -> str:
    """Three digits and a letter."""
    for letter in ("", "k", "M", "G"):
        if x < 999.5:
            return f"{x:.3g}{letter}"
        x /= 1000
    return f"{x:.3g}T"


def _rate(moment: Moment) -> tuple[str, float]:
    """The speed of a device with its unit: a small model on a laptop has GFLOP/s."""
    if 0 < moment.tflops < 0.1:
        return "GFLOP/s", moment.tflops * 1000
    return "TFLOP/s", moment.tflops


def _bubble(now: Measured) -> tuple[float, str, float] | None:
    """The bubble with its parts, which add up to it: see LEGEND."""
    if len(now.ranks) == 1:
        return None
    parts = _parts(now)
    rest = parts.pop("messages")
    parts["residual" if round(rest, 3) < 0 else "messages"] = rest
    return now.bubble, ", ".join(f"{name} {x:z.1%}" for name, x in parts.items()), now.predicted_bubble


def _parts(now: Measured) -> dict[str, float]:
    return {"table": now.of_table, "stages": now.of_stages, "host": now.of_host, "messages": now.of_messages}


def _exposed(now: Measured) -> float | tuple[float, float] | None:
    """Exposed communication as a share of all passes, with the prediction where there is one."""
    if now.exposed_communication is None:
        return None
    share = now.exposed_communication / now.passes
    return share if now.predicted_exposed is None else (share, now.predicted_exposed / now.predicted_passes)


def _exposed_text(now: Measured) -> str | None:
    shares = _exposed(now)
    both = shares if isinstance(shares, tuple) else (shares,)
    return None if shares is None else ", predicted ".join(f"{share:.1%}" for share in both if share is not None)


def _peaks(now: Measured) -> tuple[list[float], list[float]] | None:
    """Peaks of each rank in GiB."""
    peaks = [x / GIB for x in now.peak_bytes], [x / GIB for x in now.predicted_peaks]
    return peaks if now.peak_bytes else None


def _highest(now: Measured) -> tuple[float, int, float] | None:
    if (peaks := _peaks(now)) is None:
        return None
    held, rank = max((x, rank) for rank, x in enumerate(peaks[0]))
    return held, rank, peaks[1][rank]


def _stages(now: Measured) -> tuple[list[dict[str, float]], ...]:
    """Times in ms at each position of the chain."""
    return tuple(
        [{kind: x * 1e3 for kind, x in zip("fbw", stage, strict=True)} for stage in zip(*rows, strict=True)]
        for rows in ([getattr(costs, kind) for kind in "fbw"] for costs in (now.costs, now.predicted))
    )


def _copies(now: Measured) -> tuple[list[dict[str, float]], ...] | None:
    """Times of each rank's copies in ms, measured and predicted."""
    both = now.copies, now.predicted_copies
    return (
        tuple([{name: x * 1e3 for name, x in r._asdict().items()} for r in ranks] for ranks in both)
        if both[0]
        else None
    )


def _most_exposed(now: Measured) -> tuple[float, ...] | None:
    """The copies of the rank that waits for them most, with the prediction."""
    if (both := _copies(now)) is None:
        return None
    rank = max(range(len(both[0])), key=lambda rank: both[0][rank]["exposed"])
    return rank, *both[0][rank].values(), *both[1][rank].values()


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
        short=(4, lambda bubble: f"bubble {bubble[0]:z.0%} (plan {bubble[1]:.0%})"),
        line_tag=f"{PREFIX}bubble",
        key="bubble",
    ),
    Number(_bubble, "bubble: {:z.1%} ({}), predicted bubble: {:z.1%}"),
    Number(_parts, line_tag=f"{PREFIX}bubble-of-{{}}", key="bubble_parts"),
    Number(_exposed_text, "exposed communication: {}"),
    Number(_exposed, line_tag=f"{PREFIX}exposed-communication", key="exposed_communication"),
    Number(_copies, key="copies_ms", null=False),
    Number(
        lambda now: (
            None if (both := _copies(now)) is None else tuple(max(r["exposed"] for r in ranks) for ranks in both)
        ),
        line_tag=f"{PREFIX}exposed-copies-ms",
    ),
    Number(
        _most_exposed,
        "copies of rank {} (ms): {:.1f} out, {:.1f} back, {:.1f} exposed, predicted: {:.1f}, {:.1f}, {:.1f}",
    ),
    Number(_stages, key="stages_ms"),
    Number(
        lambda now: {f"{at}-{kind.upper()}": ms for at, x in enumerate(_stages(now)[0]) for kind, ms in x.items()},
        line_tag=f"{PREFIX}stage-{{}}-ms",
    ),
    Number(
        lambda now: [
            {
                "busy": r.busy * 1e3,
                "waited": r.waited * 1e3,
                "host": (r.idle - r.waited) * 1e3,
                "makespan": r.makespan * 1e3,
            }
            for r in now.ranks
        ],
        key="ranks_ms",
    ),
    Number(_peaks, key="peak_gib"),
    Number(_highest, "peak memory (GiB): {:.2f} on rank {}, predicted {:.2f}"),
)
"""Numbers of Measured."""


def _of_passes(row: Number) -> Number:
    return replace(row, of=lambda s: None if s.now is None else row.of(s.now), null=False)


NUMBERS = (
    Number(lambda s: s.progress.iteration, key="iteration"),
    Number(lambda s: s.progress.consumed_train_samples, "consumed samples: {:12d}", key="consumed_samples"),
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
    Number(lambda s: s.lr, "learning rate: {:.6E}", (7, "lr {:.2e}".format), tag="learning-rate", key="learning_rate"),
    Number(lambda s: s.result.batch, "global batch size: {:5d}", tag="batch-size", key="batch"),
    Number(lambda s: s.over.losses, "{}: {:.6E}", tag="{}", key="losses"),
    Number(
        lambda s: {
            f"{name}_layer_{n}": x for name, row in s.result.routed.per_layer.items() for n, x in enumerate(row)
        },
        tag="moe/{}",
        asked=lambda c: c.log.moe_per_layer_logging,
    ),
    Number(lambda s: s.result.routed.tokens, key="tokens_per_expert", asked=lambda c: c.log.moe_per_layer_logging),
    Number(lambda s: s.progress.loss_scale.scale, "loss scale: {:.1f}", tag="loss-scale", key="loss_scale"),
    Number(
        lambda s: s.result.grad_norm, "grad norm: {:.3f}", (6, "norm {:.2f}".format), tag="grad-norm", key="grad_norm"
    ),
    Number(lambda s: s.result.num_zeros, "num zeros: {}", (-2, "zeros {}".format), tag="num-zeros", key="num_zeros"),
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
    Number(_rate, "{} per device: {:.4g}", asked=lambda c: not c.log.log_throughput),
    Number(lambda s: s.tflops, line_tag=f"{PREFIX}tflops-per-device", key="tflops_per_device"),
    Number(
        lambda s: s.result.routed.busiest,
        "busiest expert: {:.2f} x the mean of layer {}",
        (8, lambda most: f"busiest expert {most[0]:.2f}"),
    ),
    Number(
        lambda s: None if (most := s.result.routed.busiest) is None else most[0],
        tag=f"{PREFIX}busiest-expert",
        key="busiest_expert",
        null=False,
    ),
    Number(lambda s: s.mfu, "MFU: {:.1%}", (3, "MFU {:3.0%}".format), line_tag=f"{PREFIX}mfu", key="mfu"),
    *map(_of_passes, PASSES),
    Number(lambda s: None if s.now is None else [x.text for x in s.counters.slow], key="slow", null=False),
    Number(lambda s: s.config.world_size, tag="world-size", asked=lambda c: c.log.log_world_size_to_tensorboard),
    Number(lambda s: memory_bytes(s.counters.mesh.device), tag="{}", asked=lambda c: c.log.log_memory_to_tensorboard),
    Number(lambda s: s.remaining, "time remaining: {}", (5, "left {}".format)),
)
"""All numbers in the order of the line, our own behind Megatron-LM's."""


def fields(rows: Sequence[Number], moment: Any) -> Iterator[str]:
    """The fields of a line, number by number."""
    for row in rows:
        if row.line and (value := row.of(moment)) is not None:
            several = value.items() if isinstance(value, Mapping) else [value if isinstance(value, tuple) else (value,)]
            yield from (row.line.format(*one) for one in several)


def scalars(moment: Moment, *, line: bool) -> dict[str, float]:
    """Scalars by tag: those of a step, or those that come with a line."""
    found: dict[str, float] = {}
    for row in asked(moment.config):
        tag = row.line_tag if line else row.tag
        if tag and (value := row.of(moment)) is not None:
            if isinstance(value, Mapping):
                found |= {tag.format(name): x for name, x in value.items()}
            else:
                found |= _paired(tag, f"{tag}-predicted", value)
    return found


def as_json(moment: Moment) -> dict[str, Any]:
    """Numbers by key."""
    found: dict[str, Any] = {}
    for row in asked(moment.config):
        if row.key and ((value := row.of(moment)) is not None or row.null):
            found |= _paired(row.key, f"predicted_{row.key}", value)
    return found


def asked(config: Config) -> list[Number]:
    """The rows that the flags ask for."""
    return [row for row in NUMBERS if row.asked(config)]


def _paired(name: str, predicted: str, value: Any) -> dict[str, Any]:
    return dict(zip((name, predicted), value, strict=True)) if isinstance(value, tuple) else {name: value}
