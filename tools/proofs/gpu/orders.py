"""NCCL's orders over everything: every schedule's passes, and whole steps with every axis and flag.

    python -m tools.proofs.gpu orders [passes] [steps] [--quick] [--only TEXT]

Ends with the number of cases, and with status 1 if one does not end under a rule of rules.py or two ranks bring
different things to an operation. Each case is recorded as it runs, and once more under settings that change what is
asked; tools that run one kernel at a time need CUDA_LAUNCH_BLOCKING=1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from unittest import mock

from megapipe.errors import UserError
from megapipe.schedule import build
from megapipe.schedule.patterns import PATTERNS
from tools.proofs.gpu import passes, steps
from tools.proofs.gpu.rules import Records, play

SETTINGS = {
    "": ("streams", "first", "wait"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("queue",),
    "CUDA_LAUNCH_BLOCKING": ("device", "launch"),
}
"""Variables that are set to 1, and the rules that hold then."""
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 2 "
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights "
TP, SEQUENCE = "--tensor-model-parallel-size 2 ", "--tensor-model-parallel-size 2 --sequence-parallel "
CP, VALIDATION = "--context-parallel-size 2 ", "--enable-optimizer-post-validation --post-validation-after 0 "
AXES = {
    "dp": (2, 1, ""),
    "dp zero-1": (2, 1, ZERO),
    "dp sums early": (2, 1, "--overlap-grad-reduce " + LLAMA),
    "tp": (1, 2, TP),
    "tp sequence": (1, 2, SEQUENCE + LLAMA),
    "cp ring": (1, 2, CP + LLAMA),
    "cp heads": (1, 2, CP + "--cp-comm-type a2a " + LLAMA),
    "cp gathered": (1, 2, CP + "--cp-comm-type all_gather " + LLAMA),
    "cp dp zero-1": (2, 2, CP + ZERO),
    "tp dp zero-1": (2, 2, SEQUENCE + ZERO),
    "ep dp zero-1": (2, 1, "--expert-model-parallel-size 2 " + EXPERTS + ZERO),
    "ep tp": (1, 2, SEQUENCE + "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 " + EXPERTS),
    "experts gathered": (2, 1, "--expert-model-parallel-size 2 --num-experts 4 "),
    "experts paired": (2, 1, "--expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm " + EXPERTS),
    "vocabulary": (1, 1, "--vocab-parallel-pipeline "),
    "vocabulary tp": (1, 2, "--vocab-parallel-pipeline " + TP),
    "vocabulary dp zero-1": (2, 1, "--vocab-parallel-pipeline " + ZERO),
    "post-validation": (2, 1, VALIDATION + ZERO),
    "post-validation tp": (1, 2, VALIDATION + TP),
    "recomputation": (1, 2, TP + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "),
    "muon": (1, 2, TP + "--optimizer muon "),
}
"""Data-parallel ranks, other ranks beside the pipeline's, and the flags."""
MODES = {"plain": "", "batched": "--no-overlap-p2p-communication ", "ring": "--use-ring-exchange-p2p "}
Case = tuple[str, str, Callable[[], Records]]
"""Its name, mode, and what records it."""


def of_passes(sizes: tuple[int, ...], whole: bool) -> Iterator[Case]:
    """Every schedule's passes."""
    for table in passes.tables(sizes, whole):
        for name, given in passes.ways(table):
            yield name, given["mode"], partial(passes.records_of, table, **given)


def of_steps(quick: bool) -> Iterator[Case]:
    """Whole steps: every axis under every schedule that takes it, every mode under some, pipelines of 2, 4 and 8."""
    names = ("1f1b", "zb-v", "dualpipe") if quick else tuple(PATTERNS)
    for n, (axis, schedule) in enumerate(product(AXES, names)):
        for pp in (2,) if quick or n % 8 else (2, 4, 8):
            for mode in MODES if n % 7 == 0 and not quick else list(MODES)[(n // 3 + n) % 3 if quick else 0 :][:1]:
                yield from _of_step(mode, schedule, axis, pp)


def _of_step(mode: str, schedule: str, axis: str, pp: int) -> Iterator[Case]:
    dp, others, flags = AXES[axis]
    flags += f"--pipeline-model-parallel-size {pp} --pipeline-schedule {schedule} {MODES[mode]}"
    world = pp * dp * others
    try:
        layers = build(schedule, pp, 2 * pp).placement.chain
        flags += f"--num-layers {layers} --global-batch-size {2 * pp * dp} "
        steps.ready(flags, world)
    except UserError:  # a schedule that is not there for these numbers, or has no such passes
        return
    yield f"{mode} step {schedule} pp {pp} {axis}", mode, partial(steps.records_of, flags, world)


def judge(cases: Iterator[Case], say: Callable[[str], None]) -> tuple[int, int]:
    """Numbers of cases, and of those that do not end or where ranks differ, which are said."""
    tried = failed = 0
    for name, mode, record in cases:
        tried += 1
        wrong, records = list[str](), record()
        for variable, rules in SETTINGS.items():
            # Only plain messages go ahead of their turn, and leave that where it could hold up others.
            if mode == "plain" and (variable == "CUDA_LAUNCH_BLOCKING" or (variable and "vocabulary" in name)):
                with mock.patch.dict(os.environ, {variable: "1"}):
                    records = record()
            wrong += [f"{rule}: {line}" for rule in rules for line in play(records, rule).wrong]
        failed += bool(wrong)
        for line in wrong[:8]:
            say(f"{name}: {line}")
    return tried, failed


def main(argv: Sequence[str]) -> None:
    quick = "--quick" in argv
    only = argv[argv.index("--only") + 1] if "--only" in argv else ""

    sizes = (2, 4) if quick else (2, 3, 4, 6, 8)
    parts = {"passes": partial(of_passes, sizes, not quick), "steps": partial(of_steps, quick)}
    failed = 0
    for part, cases in parts.items():
        if part in argv or not parts.keys() & set(argv):
            tried, wrong = judge((case for case in cases() if only in case[0]), partial(print, flush=True))
            print(f"{part}: {tried} cases, {wrong} fail", flush=True)
            failed += wrong
    sys.exit(1 if failed else 0)
