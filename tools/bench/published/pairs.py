"""Published runs of one model, batch and machine that differ in their layout alone.

    python -m tools.bench.published.pairs

The plan's error of a single run is mostly the same for another layout of that run: a device reaches
less than is assumed, for both. This table has the error that is left: of the ratio of two steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megapipe.commands.plan.search.final import of_run
from megapipe.flags.parse import parse
from megapipe.flags.parse import run as start
from megapipe.plan.seconds.device import DEVICES
from tools.bench.published.__main__ import config_of
from tools.bench.published.models import (
    ENDS_AS_LAYERS,
    FULL,
    MIXTRAL_8X22B,
    QWEN2_57B,
    SELECTIVE,
    gpt,
    layout,
)
from tools.bench.published.runs import FOLDING, KORTHIKANTI, RUNS, Run

QI = "arXiv 2401.10241, tables 3 and 4"
FULL_SECONDS = {"22B": 1.42, "175B": 18.13, "530B": 49.05, "1T": 94.42}
"""Seconds of a step with full recomputation, arXiv 2205.05198, table 5."""


class Gpt(NamedTuple):
    """A model of arXiv 2401.10241, table 3. Its sequences have 1,024 tokens.

    Attributes:
        micro: sequences of a microbatch.
        samples: microbatches -> samples per device and second under (1F1B, interleaved 1F1B,
            ZB-1p), of table 4.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ranks: int
    micro: int
    samples: Mapping[int, tuple[float, float, float]]


GPTS = (
    Gpt(
        *("1.5B", 22, 2304, 24, 8, 6),
        samples={24: (11.8, 13.1, 12.9), 32: (12.5, 13.4, 13.4), 64: (13.6, 13.9, 14.2)},
    ),
    Gpt(
        *("6.2B", 30, 4096, 32, 8, 3),
        samples={24: (3.50, 4.01, 3.88), 32: (3.70, 4.08, 4.00), 64: (4.03, 4.19, 4.20)},
    ),
    Gpt(
        *("14.6B", 46, 5120, 40, 16, 1),
        samples={48: (1.40, 1.54, 1.61), 64: (1.49, 1.59, 1.67), 128: (1.64, 1.66, 1.76)},
    ),
    Gpt(
        *("28.3B", 62, 6144, 48, 32, 1),
        samples={96: (0.76, 0.82, 0.87), 128: (0.80, 0.85, 0.90), 256: (0.88, 0.90, 0.96)},
    ),
)


class Unfolded(NamedTuple):
    """A run of MCore without folding, arXiv 2504.14960, table 3.

    Attributes:
        model: the flags of the model.
        experts: expert-parallel ranks, each with tensor-parallel experts.
        chunks: stages on each rank.
        mfu: the fraction of the devices' peak that is reached.
    """

    model: str
    gpus: int
    tensor: int
    pipeline: int
    experts: int
    chunks: int
    mfu: float


UNFOLDED = (
    Unfolded(MIXTRAL_8X22B, 128, 2, 8, 4, 7, 0.463),
    Unfolded(MIXTRAL_8X22B, 128, 4, 1, 8, 1, 0.366),
    Unfolded(QWEN2_57B, 64, 2, 4, 4, 7, 0.353),
    Unfolded(QWEN2_57B, 64, 4, 1, 4, 1, 0.231),
)


@dataclass(frozen=True)
class Flags:
    """Compare ratios of published steps with those of our plans."""


def pairs() -> Iterator[tuple[str, Run, Run]]:
    """Yield (what differs, a run, the same with another layout)."""
    for run in RUNS:
        if run.source == KORTHIKANTI:
            flags = run.flags.replace(SELECTIVE, FULL)
            other = run._replace(flags=flags, seconds=FULL_SECONDS[run.name])
            yield "recomputation", run, other
    for model in GPTS:
        for microbatches in model.samples:
            plain, *others = _of_schedules(model, microbatches)
            for other in others:
                yield "schedule", plain, other
    # Their best layout of each is among RUNS.
    folded = {run.gpus: run for run in RUNS if run.source == FOLDING}
    for row in UNFOLDED:
        one = folded[row.gpus]
        given = layout(256, tp=row.tensor, pp=row.pipeline, chunks=row.chunks)
        given += f" --expert-model-parallel-size {row.experts}"
        given += f" --expert-tensor-parallel-size {row.tensor}"
        other = one._replace(flags=f"{row.model} {given} --sequence-parallel", mfu=row.mfu)
        yield "tensor, pipeline, experts", one, other


def _of_schedules(model: Gpt, microbatches: int) -> list[Run]:
    """Return a model's runs under 1F1B, interleaved 1F1B and ZB-1p, with so many microbatches."""
    ranks = model.ranks
    batch = microbatches * model.micro
    bare = gpt(model.layers, model.hidden, model.heads, sequence=1024)
    bare = f"{bare} {layout(batch, micro=model.micro, pp=ranks)} {ENDS_AS_LAYERS}"
    # A stage has one layer: the embedding and the head count as one each.
    chunks = (model.layers + 2) // ranks
    schedules = (
        "1f1b",
        f"interleaved --num-virtual-stages-per-pipeline-rank {chunks}",
        "zb-h1",
    )
    runs = []
    for schedule, rate in zip(schedules, model.samples[microbatches], strict=True):
        flags = f"{bare} --pipeline-schedule {schedule}"
        seconds = batch / (rate * ranks)
        runs.append(Run(f"{model.name}, {microbatches}", QI, "a100", ranks, flags, seconds))
    return runs


def main(argv: Sequence[str]) -> None:
    """Print a row for each pair, and the mean error of their ratios by what differs."""
    parse(Flags, argv)
    print("| run | devices | differs in | published ratio | predicted | error |")
    print("|---|---|---|---|---|---|")
    errors: dict[str, list[float]] = {}
    for what, one, other in pairs():
        device = DEVICES[one.device]
        steps = [of_run(config_of(run), device).step for run in (one, other)]
        told = other.seconds / one.seconds if one.seconds else one.mfu / other.mfu
        error = steps[1] / steps[0] / told - 1
        errors.setdefault(what, []).append(abs(error))
        cells = (one.name, f"{one.gpus} {one.device}", what, f"{told:.3f}")
        print(f"| {' | '.join(cells)} | {steps[1] / steps[0]:.3f} | {error:+.1%} |", flush=True)
    everything = [error for of_one in errors.values() for error in of_one]
    for what, found in {**errors, "all": everything}.items():
        mean = sum(found) / len(found)
        print(f"{what}: {len(found)} pairs, mean {mean:.1%}, worst {max(found):.1%}")


if __name__ == "__main__":
    start(main)
