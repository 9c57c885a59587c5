"""Train with shares of a stage and with plain data parallelism under every schedule, and compare
the bits.

    python tools/proofs/check_zero.py
        dp 2: losses, norms, weights and moments must be the same
    python tools/proofs/check_zero.py --strategy optim_grads_params --pp 4
        the same for ZeRO-3, on four stages
    python tools/proofs/check_zero.py --dp 4 --within 2e-6
        four numbers have several sums: losses, norms and weights must be near

Each run trains a tiny GPT for twenty steps, ranks as threads over gloo, with gradients that are
clipped.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from megapipe.config import Config
from megapipe.flags.parse import parse, run
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import SCHEDULES, entry_of
from tools.proofs.fuzz_post_validation import Case, Outcome, differences, made_datasets, train

Strategy = Literal["optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True)
class _Shares(Case):
    """A case with shares of what --data-parallel-sharding-strategy says."""

    strategy: Strategy = "optim"

    def config(self, *, late: bool) -> Config:
        plain = super().config(late=late)
        par = replace(
            plain.parallel, use_megatron_fsdp=True, data_parallel_sharding_strategy=self.strategy
        )
        return replace(plain, parallel=par)


def compare(
    case: Case, within: float = 0.0, strategy: Strategy = "optim"
) -> tuple[list[str], float]:
    """Compare a case with sharded stages to the same case without shards and overlap.

    Returns the differences, and the largest of a number.
    """
    made_datasets()
    sizes: dict[str, Any] = {"tp": case.tp, "dp": case.dp, "pp": case.pp}
    with contextlib.redirect_stdout(io.StringIO()):
        plain, split = (
            run_threads(partial(train, case=one, late=False), **sizes, timeout_s=300)
            for one in (replace(case, distributed=False, overlap=False), split_by(case, strategy))
        )
    norms = [result.grad_norm for result in plain[0].results]
    if not any(norm > case.clip for norm in norms):
        return [
            f"nothing was clipped at {case.clip:g}: norms {min(norms):.3g} to {max(norms):.3g}"
        ], 0.0
    largest = max(_largest(a, b) for a, b in zip(plain, split, strict=True))
    if within:
        return [f"differs by {largest:.2g}"] if largest > within else [], largest
    return differences(plain, split), largest


def split_by(case: Case, strategy: Strategy) -> Case:
    """The case with shares."""
    return _Shares(**vars(replace(case, distributed=True)), strategy=strategy)


def _largest(a: Outcome, b: Outcome) -> float:
    """Difference of losses and norms, relative, and of weights and moments.

    Not of the keys' bias: softmax does not see it, so that its gradient is rounding, of which Adam
    makes whole steps.
    """
    said = [[(r.losses["lm loss"], r.grad_norm) for r in outcome.results] for outcome in (a, b)]
    pairs = zip(*(torch.tensor(numbers, dtype=torch.float64) for numbers in said), strict=True)
    apart = [float(((x - y) / x).abs().max()) for x, y in pairs]
    for name, x in a.tensors.items():
        away = (x - b.tensors[name]).abs()
        if "linear_qkv.bias" in name:  # of two heads
            away = away.view(2, 3, -1)[:, ::2]
        apart.append(float(away.max()))
    return max(apart)


@dataclass(frozen=True)
class Flags:
    """Compare sharded stages with plain data parallelism under every schedule."""

    schedules: tuple[str, ...] = tuple(SCHEDULES)
    """Names; weights are shares of schedules with one copy of the model."""
    precision: tuple[Literal["float32", "bf16", "fp16"], ...] = ("float32", "bf16")
    """Types to train in."""
    strategy: Strategy = "optim"
    """What is split: optimizer state (ZeRO-1), gradients too (ZeRO-2), weights too (ZeRO-3)."""
    overlap: bool = False
    """With --overlap-grad-reduce and --overlap-param-gather."""
    buckets: int | None = None
    """So many per stage, each a layer, with --overlap."""
    dp: int = 2
    """Data-parallel ranks."""
    pp: int = 2
    """Pipeline ranks."""
    microbatches: int = 4
    """In a step."""
    steps: int = 20
    """Of each run."""
    clip: float = 0.5
    """As --clip-grad."""
    within: float = 0.0
    """What may differ; 0: no bit."""


def main(argv: Sequence[str]) -> None:
    options = parse(Flags, argv)
    torch.set_num_threads(1)
    whole = options.strategy == "optim"
    for name in (name for name in options.schedules if whole or entry_of(name).copies == 1):
        for precision in options.precision:
            begun = time.process_time()
            case = Case(
                name,
                options.pp,
                options.microbatches,
                dp=options.dp,
                overlap=options.overlap,
                layers=options.buckets or 1,
                buckets=options.buckets,
                precision=precision,
                clip=options.clip,
                steps=options.steps,
            )
            found, largest = compare(case, options.within, options.strategy)
            how = f"{name} {precision}"
            if found:
                print(f"{how} differs: {case}", *found[:12], sep="\n", flush=True)
                os._exit(1)  # threads may wait for a rank that failed
            largest_text = f", at most {largest:.2g} apart" if options.within else ""
            print(
                f"{how}: same{largest_text} ({time.process_time() - begun:.1f} CPU s)", flush=True
            )


if __name__ == "__main__":
    run(main)
