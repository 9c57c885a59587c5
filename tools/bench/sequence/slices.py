"""One microbatch of a long sequence on two ranks: a pipeline of whole sequences, of slices, and
context parallelism.

    python tools/bench/sequence/slices.py --tokens 32768
    python tools/bench/sequence/slices.py --tokens 4096 --layers 2 --slices 4 8

Each row is trained in processes of its own, in turns with the others: a step's time by the clock,
the processor's time of all ranks, and the most that a rank's process held above what it had before,
as Linux counts it; beside it the plan's bytes of activation. Shortest of all rounds: time of the
clock means little beside other programs.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[3]))

import torch

from megapipe.checks.run import validate
from megapipe.commands.ranks import run_ranks
from megapipe.config import Config
from megapipe.data.build import build_datasets
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.axis import CPU
from megapipe.distributed.mesh import ProcessMesh
from megapipe.flags.parse import parse, run
from megapipe.models.provider import gpt_provider
from megapipe.plan import make_plan
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import Training

VOCAB = 127


@dataclass(frozen=True)
class Flags:
    """One microbatch of a long sequence on two ranks, cut in different ways."""

    tokens: int = 32768
    """Length of the sequence."""
    slices: tuple[int, ...] = (4, 8)
    """Numbers of slices to try."""
    layers: int = 4
    """Layers."""
    hidden: int = 64
    """Width."""
    heads: int = 2
    """Attention heads."""
    steps: int = 1
    """Steps, of which the shortest counts."""
    rounds: int = 1
    """Times that all are run."""


class Took(NamedTuple):
    """A row of the table: seconds of a step, processor seconds of all ranks, the largest MiB of a
    rank, and the loss.
    """

    seconds: float
    processor: float
    held: float
    loss: float


def ways(flags: Flags) -> Iterator[tuple[str, str]]:
    """Yield the runs that are compared, with their flags."""
    two = "--pipeline-model-parallel-size 2"
    yield "one rank", ""
    yield "pipeline of 2, whole", two
    for n in flags.slices:
        yield f"pipeline of 2, {n} slices of equal work", f"{two} --pipeline-slices {n}"
        yield (
            f"the same, zb-h1, {n} slices",
            f"{two} --pipeline-slices {n} --pipeline-schedule zb-h1",
        )
    n = flags.slices[-1]
    yield (
        f"pipeline of 2, {n} slices of equal length",
        f"{two} --pipeline-slices {n} --pipeline-slice-cuts equal",
    )
    yield "context parallelism of 2", "--context-parallel-size 2"


def config_of(flags: Flags, more: str) -> Config:
    """A run of the tiny GPT with these flags too."""
    line = (
        f"--num-layers {flags.layers} --hidden-size {flags.hidden} --num-attention-heads "
        f"{flags.heads} "
        f"--seq-length {flags.tokens} --max-position-embeddings {flags.tokens} "
        "--position-embedding-type rope "
        "--attention-dropout 0 --hidden-dropout 0 --cross-entropy-loss-fusion --mock-data "
        f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --padded-vocab-size {VOCAB + 1} "
        "--num-workers 0 "
        "--eval-iters 0 --split 1,0,0 --micro-batch-size 1 --global-batch-size 1 --train-iters 100 "
        "--lr 1e-3 "
        "--distributed-backend gloo"
    )
    config = parse(Config, [*line.split(), *more.split()])
    config = replace(config, world_size=config.parallel.ranks_of_a_replica)
    validate(config, has_cuda=False)
    return config


def train(config: Config, steps: int) -> Took:
    """One rank's part."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  the run's own lines
    torch.set_num_threads(1)
    mesh = ProcessMesh.create(config.parallel, CPU)
    data = build_datasets(config, build_tokenizer(config.data))
    plan = make_plan(config)
    training = Training(
        config, mesh, gpt_provider, forward_step, data, VOCAB, time.monotonic(), plan=plan
    )
    before = _resident()
    took, used, loss = list[float](), list[float](), 0.0
    for _ in range(steps):
        mesh.world.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        loss = training.driver.whole().losses["lm loss"]
        took.append(time.perf_counter() - began)
        used.append(time.process_time() - cpu)
    most = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20
    seconds, held, loss = mesh.world.all_reduce(
        torch.tensor([min(took), most, loss]), "max"
    ).tolist()
    (processor,) = mesh.world.all_reduce(torch.tensor([min(used)])).tolist()
    mesh.close()
    return Took(seconds, processor, held, loss)


def _resident() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    print(f"{flags.tokens} tokens, {flags.layers} layers of {flags.hidden}, {os.cpu_count()} cores")
    shortest: dict[str, Took] = {}
    for turn in range(flags.rounds):
        for name, more in ways(flags):
            config = config_of(flags, more)
            found = run_ranks(
                config.world_size,
                train,
                config,
                flags.steps,
                preload=("megapipe.training.pretrain",),
            )[0]
            last = shortest.get(name, found)
            times = min(found.seconds, last.seconds), min(found.processor, last.processor)
            shortest[name] = Took(*times, min(found.held, last.held), found.loss)
            print(f"round {turn + 1}, {name}: {found}", file=sys.stderr, flush=True)
    print(
        "| way | s a step | processor s | MiB held | plan's MiB | loss "
        "|\n|---|---:|---:|---:|---:|---:|"
    )
    for name, more in ways(flags):
        row, planned = shortest[name], max(make_plan(config_of(flags, more)).timeline.peak) / 2**20
        print(
            f"| {name} | {row.seconds:.1f} | {row.processor:.1f} | {row.held:.0f} | {planned:.0f} "
            f"| {row.loss:.6f} |"
        )


if __name__ == "__main__":
    run(main)
