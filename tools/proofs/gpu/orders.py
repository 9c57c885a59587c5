"""NCCL's orders over everything: every schedule's passes, and whole steps with every axis and flag.

    python -m tools.proofs.gpu orders [passes] [steps] [--quick] [--only TEXT,TEXT]

Ends with the number of cases, and with status 1 if one does not end under a rule of rules.py or two
ranks bring different things to an operation. Each case is recorded as it runs, and once more under
settings that change what is asked; tools that run one kernel at a time need CUDA_LAUNCH_BLOCKING=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import process_time
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
ZERO = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 2 "
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights "
)
TP, SEQUENCE = (
    "--tensor-model-parallel-size 2 ",
    "--tensor-model-parallel-size 2 --sequence-parallel ",
)
PIECES = "--tp-comm-overlap "
CP, EP = "--context-parallel-size 2 ", "--expert-model-parallel-size 2 "
VALIDATION = "--enable-optimizer-post-validation --post-validation-after 0 "
PAIRS, DEPTH = "--overlap-moe-expert-parallel-comm ", "--mtp-num-layers 1 "
SLICES, COPIES = (
    "--pipeline-slices 2 " + LLAMA,
    "--offload-time 0.1 --fine-grained-activation-offloading ",
)
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe blockwise --fp8-param-gather "
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
AXES = {
    "dp": (2, 1, ""),
    "dp zero-1": (2, 1, ZERO),
    "dp zero-1 fp8": (2, 1, FP8 + ZERO),
    "dp zero-3 fp8": (2, 1, FP8 + FSDP),
    "dp sums early": (2, 1, "--overlap-grad-reduce " + LLAMA),
    "dp zero-2": (2, 1, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads "),
    "dp zero-3": (2, 1, FSDP),
    "cp dp zero-3": (2, 2, CP + FSDP),
    "ep dp zero-3": (2, 1, EP + EXPERTS + FSDP),
    "tp dp zero-3": (2, 2, SEQUENCE + FSDP),
    "tp": (1, 2, TP),
    "tp sequence": (1, 2, SEQUENCE + LLAMA),
    "tp overlapped": (1, 2, SEQUENCE + PIECES),
    "tp overlapped, four ranks": (
        1,
        4,
        "--tensor-model-parallel-size 4 --sequence-parallel " + PIECES,
    ),
    "tp overlapped whole": (1, 2, TP + PIECES + LLAMA),
    "cp ring": (1, 2, CP + LLAMA),
    "cp heads": (1, 2, CP + "--cp-comm-type a2a " + LLAMA),
    "cp gathered": (1, 2, CP + "--cp-comm-type all_gather " + LLAMA),
    "cp dp zero-1": (2, 2, CP + ZERO),
    "tp dp zero-1": (2, 2, SEQUENCE + ZERO),
    "ep dp zero-1": (2, 1, EP + EXPERTS + ZERO),
    "ep tp": (1, 2, SEQUENCE + EP + "--expert-tensor-parallel-size 1 " + EXPERTS),
    "ep etp": (2, 2, SEQUENCE + EP + "--expert-tensor-parallel-size 2 " + EXPERTS),
    "experts gathered": (2, 1, EP + "--num-experts 4 "),
    "experts paired": (2, 1, EP + PAIRS + EXPERTS),
    "experts paired tp": (
        1,
        2,
        SEQUENCE + EP + "--expert-tensor-parallel-size 1 " + PAIRS + EXPERTS,
    ),
    "experts paired zero-1": (2, 1, EP + PAIRS + "--delay-wgrad-compute " + EXPERTS + ZERO),
    "tp paired": (1, 2, SEQUENCE + PAIRS),
    "cp paired": (1, 2, CP + PAIRS),
    "vocabulary": (1, 1, "--vocab-parallel-pipeline "),
    "vocabulary tp": (1, 2, "--vocab-parallel-pipeline " + TP),
    "vocabulary dp zero-1": (2, 1, "--vocab-parallel-pipeline " + ZERO),
    "post-validation": (2, 1, VALIDATION + ZERO),
    "post-validation tp": (1, 2, VALIDATION + TP),
    "post-validation undone": (2, 1, VALIDATION + ZERO + "--clip-grad 1e-9 "),
    "depth": (1, 1, DEPTH),
    "depth tp": (1, 2, DEPTH + SEQUENCE + LLAMA),
    "depths dp zero-1": (2, 1, "--mtp-num-layers 2 " + ZERO),
    "slices": (1, 1, SLICES),
    "slices tp": (1, 2, SLICES + SEQUENCE),
    "slices dp zero-1": (2, 1, SLICES + ZERO),
    "copies": (1, 1, COPIES),
    "copies dp zero-1": (2, 1, "--offload-time 0.1 --cpu-offload " + ZERO),
    "copies tp": (1, 2, COPIES + SEQUENCE),
    "recomputation": (
        1,
        2,
        TP + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 ",
    ),
    "muon": (1, 2, TP + "--optimizer muon "),
}
"""Data-parallel ranks, other ranks beside the pipeline's, and the flags."""
MODES = {
    "plain": "",
    "batched": "--no-overlap-p2p-communication ",
    "ring": "--use-ring-exchange-p2p ",
}
Case = tuple[str, str, Callable[[], Records]]
"""Its name, mode, and what records it."""


def of_passes(sizes: tuple[int, ...], whole: bool) -> Iterator[Case]:
    """Every schedule's passes."""
    for table in passes.tables(sizes, whole):
        for name, given in passes.ways(table):
            yield name, given["mode"], partial(passes.records_of, table, **given)


def of_steps(quick: bool) -> Iterator[Case]:
    """Whole steps: every axis under every schedule with 2 ranks; with 3 to 8 every axis, and every
    schedule there is.

    Modes change from case to case, so that each axis and each schedule has all three of them. Quick
    ones run every rank, the others one for each place of the pipeline.
    """
    names = ("1f1b", "zb-v", "dualpipe") if quick else tuple(PATTERNS)
    for n, axis in enumerate(AXES):
        for k, schedule in enumerate(names):
            yield from _of_step(schedule, axis, 2, n + k, quick)
    for pp in () if quick else range(3, 9):
        used = dict.fromkeys(names, 0)
        for n, axis in enumerate(AXES):
            for schedule in sorted(names, key=lambda name: used[name]):
                if cases := [*_of_step(schedule, axis, pp, n + pp, quick)]:
                    used[schedule] += 1
                    yield from cases
                    break


def _of_step(schedule: str, axis: str, pp: int, turn: int, whole: bool) -> Iterator[Case]:
    dp, others, flags = AXES[axis]
    mode = [*MODES][turn % 3]
    flags += f"--pipeline-model-parallel-size {pp} --pipeline-schedule {schedule} {MODES[mode]}"
    world = pp * dp * others
    try:
        layers = build(schedule, pp, 2 * pp).placement.chain
        flags += f"--num-layers {layers} --global-batch-size {2 * pp * dp} "
        flags += f"--make-vocab-size-divisible-by {16 * pp} "
        steps.ready(flags, world)
    except UserError:  # a schedule that is not there for these numbers, or has no such passes
        return
    yield (
        f"{mode} step {schedule} pp {pp} {axis}",
        mode,
        partial(steps.records_of, flags, world, 8 if whole else 2),
    )


def judge(cases: Iterator[Case], say: Callable[[str], None]) -> tuple[int, int]:
    """Return the number of cases, and the number of cases that do not end or whose ranks differ.

    The latter are printed.
    """
    tried = failed = 0
    for name, mode, record in cases:
        tried += 1
        wrong, records = list[str](), record()
        for variable, rules in SETTINGS.items():
            # Only plain messages go ahead of their turn, and leave that where the host waits for
            # kernels.
            if mode == "plain" and variable == "CUDA_LAUNCH_BLOCKING":
                with mock.patch.dict(os.environ, {variable: "1"}):
                    records = record()
            wrong += [f"{rule}: {line}" for rule in rules for line in play(records, rule).wrong]
        failed += bool(wrong)
        for line in wrong[:8]:
            say(f"{name}: {line}")
        if tried % 50 == 0:
            say(
                f"{tried} cases, {failed} fail; {process_time() / 60:.1f} minutes of CPU; the last "
                f"{name}"
            )
    return tried, failed


def main(argv: Sequence[str]) -> int:
    """The status to end with. --only: cases whose name has one of these."""
    quick = "--quick" in argv
    only = argv[argv.index("--only") + 1].split(",") if "--only" in argv else [""]
    sizes = (2, 4) if quick else (2, 3, 4, 6, 8)
    parts = {"passes": partial(of_passes, sizes, not quick), "steps": partial(of_steps, quick)}
    failed = 0
    for part, cases in parts.items():
        if part in argv or not parts.keys() & set(argv):
            wanted = (case for case in cases() if any(text in case[0] for text in only))
            tried, wrong = judge(wanted, partial(print, flush=True))
            print(
                f"{part}: {tried} cases, {wrong} fail; {process_time() / 60:.1f} minutes of CPU",
                flush=True,
            )
            failed += wrong or not tried
    return min(failed, 1)
