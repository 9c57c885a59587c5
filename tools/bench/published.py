"""Compare the plan's step with published runs: their layout, their seconds or FLOP/s, and ours.

    python -m tools.bench.published

The rows are of papers that name the model, the layout, the batch and what a step took:

- Narayanan et al. 2021 (arXiv 2104.04473), table 1: A100, full recomputation, whose TFLOP/s count
  the recomputed forward. The table does not name the number of stages per rank; one is assumed.
- Korthikanti et al. 2022 (arXiv 2205.05198), tables 3 and 5: A100, sequence parallelism and
  selective recomputation; three stages per rank for 175B and 530B.
- Llama 3 (arXiv 2407.21783), table 4: H100, grouped queries; a schedule like interleaved 1F1B,
  whose number of stages per rank is not published; eight are assumed.

The papers' numbers were written down from memory. Rates are the defaults of `--rates a100` and
`--rates h100`. Nothing is fitted to a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.flags.parse import run as start
from megapipe.plan import GIB, make_plan
from megapipe.plan.seconds.device import DEVICES
from megapipe.plan.seconds.page import numbers
from megapipe.plan.seconds.step import timed

COMMON = (
    "--bf16 --mock-data --tokenizer-type NullTokenizer --train-iters 9 --lr 1e-4 "
    "--use-distributed-optimizer --micro-batch-size 1"
)
GPT = "--seq-length 2048 --max-position-embeddings 2048 --vocab-size 51199"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --sequence-parallel"
LLAMA = (
    "--seq-length 8192 --max-position-embeddings 8192 --vocab-size 128255 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 53248 --num-layers 126 --hidden-size 16384 --num-attention-heads 128"
)


class Run(NamedTuple):
    """A published run.

    Attributes:
        name: the model and its source.
        device: a name of DEVICES.
        gpus: the number of devices.
        flags: the model, the layout and the batch.
        tflops: published TFLOP/s of a device; None if `seconds` is published.
        again: the published TFLOP/s count a recomputed forward.
        seconds: published seconds of a step.
    """

    name: str
    device: str
    gpus: int
    flags: str
    tflops: float | None = None
    again: bool = False
    seconds: float | None = None


def _gpt(layers: int, hidden: int, heads: int, tp: int, pp: int, batch: int, more: str) -> str:
    return (
        f"{GPT} --num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
        f"--global-batch-size {batch} {more}"
    )


_THREE = "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 3"
_LLAMA_405B = (
    f"{LLAMA} --sequence-parallel --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
    "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 8 "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
    "--global-batch-size 2048"
)
RUNS = (
    Run("1.7B, Narayanan", "a100", 32, _gpt(24, 2304, 24, 1, 1, 512, FULL), 137, True),
    Run("3.6B, Narayanan", "a100", 64, _gpt(30, 3072, 32, 2, 1, 512, FULL), 138, True),
    Run("7.5B, Narayanan", "a100", 128, _gpt(36, 4096, 32, 4, 1, 512, FULL), 142, True),
    Run("18.4B, Narayanan", "a100", 256, _gpt(40, 6144, 48, 8, 1, 1024, FULL), 135, True),
    Run("39.1B, Narayanan", "a100", 512, _gpt(48, 8192, 64, 8, 2, 1536, FULL), 138, True),
    Run("76.1B, Narayanan", "a100", 1024, _gpt(60, 10240, 80, 8, 4, 1792, FULL), 140, True),
    Run("145.6B, Narayanan", "a100", 1536, _gpt(80, 12288, 96, 8, 8, 2304, FULL), 148, True),
    Run("310.1B, Narayanan", "a100", 1920, _gpt(96, 16384, 128, 8, 16, 2160, FULL), 155, True),
    Run("1008B, Narayanan", "a100", 3072, _gpt(128, 25600, 160, 8, 64, 3072, FULL), 163, True),
    Run("22B, Korthikanti", "a100", 8, _gpt(48, 6144, 64, 8, 1, 4, SELECTIVE), seconds=1.10),
    Run(
        "175B, Korthikanti",
        "a100",
        64,
        _gpt(96, 12288, 96, 8, 8, 64, f"{SELECTIVE} {_THREE}"),
        seconds=13.75,
    ),
    Run(
        "530B, Korthikanti",
        "a100",
        280,
        _gpt(105, 20480, 128, 8, 35, 280, f"{SELECTIVE} {_THREE}"),
        seconds=37.83,
    ),
    Run(
        "1T, Korthikanti",
        "a100",
        512,
        _gpt(128, 25600, 160, 8, 64, 512, SELECTIVE),
        seconds=71.49,
    ),
    Run("405B, Llama 3", "h100", 8192, _LLAMA_405B, 430),
)


def predicted(run: Run) -> tuple[float, float, float, float]:
    """Return seconds and MFU of our plan, the model's FLOPs of a step, and the peak in bytes."""
    config = parse(Config, [*COMMON.split(), *run.flags.split()])
    vocab = config.model.padded_vocab((config.data.vocab_size or 0) + 1)
    model = replace(config.model, padded_vocab_size=vocab)
    config = replace(config, model=model, world_size=run.gpus)
    device = DEVICES[run.device]
    plan = make_plan(config)
    found = numbers(timed(plan, config, device), device)
    flops = found["mfu"] * found["seconds"] * device.peak * run.gpus
    return found["seconds"], found["mfu"], flops, max(plan.peak_bytes)


@dataclass(frozen=True)
class Flags:
    """Compare the seconds of published runs with those of our plan of their layout."""

    only: str = ""
    """Runs whose name has this text."""


def main(argv: Sequence[str]) -> None:
    """Print a table of all runs, and the mean error."""
    flags = parse(Flags, argv)
    print("| run | devices | published s | predicted s | error | published MFU | predicted | GiB |")
    print("|---|---|---|---|---|---|---|---|")
    errors = []
    for run in [x for x in RUNS if flags.only in x.name]:
        seconds, mfu, flops, peak = predicted(run)
        published = run.seconds
        if published is None:
            assert run.tflops is not None
            # With full recomputation a step has four forwards' worth of products, not three.
            counted = flops * (4 / 3 if run.again else 1)
            published = counted / (run.tflops * 1e12 * run.gpus)
        device = DEVICES[run.device]
        theirs = flops / (published * device.peak * run.gpus)
        error = seconds / published - 1
        errors.append(abs(error))
        times = f"{published:.2f} | {seconds:.2f} | {error:+.1%}"
        reached = f"{theirs:.1%} | {mfu:.1%} | {peak / GIB:.3g}"
        print(f"| {run.name} | {run.gpus} {run.device} | {times} | {reached} |")
    if errors:
        print(f"mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    start(main)
