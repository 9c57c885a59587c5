"""Measure tokens per CPU-second of a training step, also over tensor-parallel ranks.

In the same run, nanoGPT with torch.compile and fused AdamW is measured.

git clone https://github.com/karpathy/nanoGPT; python tools/bench/training.py --nanogpt nanoGPT --tp
2

Each contender has processes of its own with one thread; rounds alternate, so a busy machine hits
all alike. CPU time of all its ranks, not wall time (with --device cuda a GPU's): forward, backward
and optimizer, warm-up steps left out. With --tp 2 comes "ours x 2": two runs of one process each at
once, which share caches and memory as two ranks do.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megapipe.config import BatchConfig, Config, ModelConfig, ParallelConfig, PrecisionConfig
from megapipe.distributed.device import keep_freed_memory, synchronize
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse, run
from megapipe.models.layer import compile_layers
from megapipe.models.provider import gpt_provider
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rule import Rates
from megapipe.partition.spans import partition
from megapipe.schedule import build
from megapipe.tensor_parallel.rng import initialize
from megapipe.training.steps.stages import Stages
from megapipe.training.steps.step import train_step

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Size:
    """A GPT-2 and its batch."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    batch: int


SIZES = {
    "20m": Size(8, 384, 6, 16384, 512, 4),
    "124m": Size(12, 768, 12, 50304, 1024, 1),
    "350m": Size(24, 1024, 16, 50304, 1024, 1),
}


@dataclass(frozen=True)
class Contender:
    """A row of the table: that many runs at once, each over that many tensor-parallel ranks."""

    name: str
    tp: int = 1
    runs: int = 1


@dataclass(frozen=True)
class Flags:
    """Flags of this tool."""

    nanogpt: str | None = None
    """A checkout of nanoGPT to run beside; without it only ours is measured."""
    size: tuple[str, ...] = ("20m", "124m")
    """Which models: 20m (sequence 512, batch 4), 124m (sequence 1024, batch 1)."""
    precision: tuple[str, ...] = ("fp32", "bf16")
    """fp32, bf16. nanoGPT's bf16 holds its weights in bf16, ours keeps float32 main weights and
    gradients.
    """
    tp: tuple[int, ...] = ()
    """Ours over that many tensor-parallel ranks too."""
    sequence_parallel: bool = False
    """Those with --sequence-parallel."""
    rounds: int = 3
    """How often each contender is measured; the table shows medians."""
    steps: int = 6
    """Measured steps of a round."""
    compile: bool = False
    """Ours with --compile too."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: seconds of a GPU in place of CPU time. Not with --tp."""
    batch: int | None = None
    """Sequences of a microbatch in place of the size's own."""
    least: float | None = None
    """Exit status 1 if ours is below that share of nanoGPT's tokens per second."""
    child: Literal["", "ours", "nanogpt"] = ""
    """Internal: be one process of a contender and print its seconds per step."""


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    wrong = [s for s in flags.size if s not in SIZES] + [
        p for p in flags.precision if p not in ("fp32", "bf16")
    ]
    if wrong:
        raise ConfigError(
            f"--size takes {' '.join(SIZES)}, --precision takes fp32 bf16; got {' '.join(wrong)}"
        )
    if flags.nanogpt is not None and not (Path(flags.nanogpt) / "model.py").is_file():
        raise ConfigError(
            f"--nanogpt {flags.nanogpt} holds no model.py; git clone "
            "https://github.com/karpathy/nanoGPT"
        )
    if flags.child:
        step = (ours if flags.child == "ours" else nanogpt)(
            flags, _sized(flags, *flags.size), "bf16" in flags.precision
        )
        print(json.dumps(measure(step, flags.steps, torch.device(flags.device))))
        return
    if flags.device == "cuda" and (flags.tp or not torch.cuda.is_available()):
        raise ConfigError("--device cuda needs a GPU, and no --tp: ranks have CPUs here")
    if flags.least is not None and flags.nanogpt is None:
        raise ConfigError(
            f"--least {flags.least:g} compares with nanoGPT; name a checkout of it with --nanogpt"
        )
    if odd := [n for n in flags.tp if n < 2 or any(SIZES[size].heads % n for size in flags.size)]:
        raise ConfigError(
            f"--tp {odd[0]} must be 2 or more and divide the attention heads: 6 in 20m, 12 in 124m"
        )
    if flags.sequence_parallel and not flags.tp:
        raise ConfigError(
            "--sequence-parallel splits over tensor-parallel ranks; name how many: --tp 2"
        )
    contenders = [Contender("ours")]
    contenders += [
        c for n in flags.tp for c in (Contender(f"ours x {n}", runs=n), Contender(f"tp {n}", tp=n))
    ]
    contenders += [Contender("nanogpt")] if flags.nanogpt else []
    unit = "tokens/CPU-second" if flags.device == "cpu" else "    tokens/second"
    print(f"size  precision  contender   {unit}   ours / it")
    worst = math.inf
    for size in flags.size:
        for precision in flags.precision:
            rounds = [
                [_run(flags, c, size, precision) for c in contenders] for _ in range(flags.rounds)
            ]
            for contender, *values in zip(contenders, *rounds, strict=True):
                ratios = [first[0] / value for first, value in zip(rounds, values, strict=True)]
                ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                rate = statistics.median(values)
                print(
                    f"{size:5s} {precision:10s} {contender.name:11s} {rate:17.0f}   {ratio}",
                    flush=True,
                )
                worst = (
                    min(worst, statistics.median(ratios)) if contender.name == "nanogpt" else worst
                )
    if flags.least is not None and worst < flags.least:
        raise SystemExit(1)


def _run(flags: Flags, contender: Contender, size: str, precision: str) -> float:
    """Tokens per CPU-second of one contender in processes of its own."""
    tp, runs = contender.tp, contender.runs
    command = [
        sys.executable,
        __file__,
        "--child",
        "nanogpt" if contender.name == "nanogpt" else "ours",
    ]
    command += ["--size", size, "--precision", precision, "--steps", str(flags.steps)]
    command += ["--device", flags.device]
    command += ["--batch", str(flags.batch)] if flags.batch is not None else []
    command += ["--nanogpt", flags.nanogpt] if flags.nanogpt else []
    command += ["--compile"] if flags.compile else []
    command += ["--sequence-parallel"] if flags.sequence_parallel and tp > 1 else []
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(tp)}
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
    processes = [
        subprocess.Popen(
            command,
            env=env | {"RANK": str(n)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(tp * runs)
    ]
    outputs = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(err for _, err in outputs))
    seconds = sum(float(json.loads(out.splitlines()[-1])) for out, _ in outputs)
    return runs * SIZES[size].seq * _sized(flags, size).batch / seconds


def _sized(flags: Flags, name: str) -> Size:
    return SIZES[name] if flags.batch is None else replace(SIZES[name], batch=flags.batch)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def measure(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Median seconds of a step, of CPU time or of a GPU, after two to warm up."""
    clock, times = time.process_time if device.type == "cpu" else time.perf_counter, []
    for n in range(steps + 2):
        begin = clock()
        step()
        synchronize(device)
        if n >= 2:
            times.append(clock() - begin)
    return statistics.median(times)


def ours(flags: Flags, size: Size, bf16: bool) -> Callable[[], object]:
    """One step of megapipe, one microbatch, split over as many tensor-parallel ranks as WORLD_SIZE
    says.
    """
    keep_freed_memory()
    tp = int(os.environ["WORLD_SIZE"])
    model = ModelConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        max_position_embeddings=size.seq,
        padded_vocab_size=size.vocab,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        cross_entropy_loss_fusion=True,
        sequence_parallel=flags.sequence_parallel,
    )
    parallel = ParallelConfig(tensor_model_parallel_size=tp)
    batch = BatchConfig(micro_batch_size=size.batch, seq_length=size.seq, train_iters=1)
    precision = PrecisionConfig(bf16=bf16)
    config = Config(model=model, parallel=parallel, batch=batch, precision=precision, world_size=tp)
    mesh, schedule = ProcessMesh.create(parallel, torch.device(flags.device)), build("1f1b", 1, 1)
    module = gpt_provider(model, partition(size.layers, schedule.placement)[0], mesh.tp).to(
        mesh.device
    )
    initialize(module, 1, mesh.tp)
    module = module.bfloat16() if bf16 else module
    if flags.compile:
        compile_layers(module)
    sys.path.insert(0, str(ROOT))
    from megapipe.training.forward_step import forward_step

    pipeline = Stages(config, schedule, [module], forward_step, mesh, 0)
    optimizer = Optimizer([module], config.optimizer, mesh)
    data = torch.randint(
        0, size.vocab, (1, size.batch, size.seq + 1), generator=torch.Generator().manual_seed(1)
    )
    return lambda: train_step(pipeline, optimizer, [*data], 0, Rates(1e-4))


def nanogpt(flags: Flags, size: Size, bf16: bool) -> Callable[[], object]:
    """Do a step of nanoGPT's own model with torch.compile and fused AdamW, as its train.py does."""
    sys.path.insert(0, str(flags.nanogpt))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    config = GPTConfig(
        block_size=size.seq,
        vocab_size=size.vocab,
        n_layer=size.layers,
        n_head=size.heads,
        n_embd=size.hidden,
        dropout=0.0,
        bias=True,
    )
    model: Any = GPT(config).to(flags.device)
    model = model.bfloat16() if bf16 else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    compiled: Any = torch.compile(model)
    tokens = torch.randint(0, size.vocab, (size.batch, size.seq + 1), device=flags.device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> None:
        _, loss = compiled(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    run(main)
