"""Tokens per CPU-second of a training step, beside nanoGPT with torch.compile and fused AdamW in the same run.

git clone https://github.com/karpathy/nanoGPT; python tools/bench_training.py --nanogpt nanoGPT

Each contender is a process of its own with one thread; rounds alternate, so a busy machine hits both alike. CPU time,
not wall time: forward, backward and optimizer of one process, warm-up steps left out.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megapipe.cli import parse, stop
from megapipe.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megapipe.errors import ConfigError, UserError
from megapipe.mesh import ProcessMesh
from megapipe.models.layer import compile_layers
from megapipe.models.provider import gpt_provider
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.partition import partition
from megapipe.schedule import build
from megapipe.tensor_parallel.rng import initialize
from megapipe.training.step import Pipeline, train_step

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Size:
    """A GPT-2 and its batch."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    batch: int


SIZES = {"20m": Size(8, 384, 6, 16384, 512, 4), "124m": Size(12, 768, 12, 50304, 1024, 1)}


@dataclass(frozen=True)
class Flags:
    """Flags of this tool."""

    nanogpt: str | None = None
    """A checkout of nanoGPT to run beside; without it only ours is measured."""
    size: tuple[str, ...] = ("20m", "124m")
    """Which models: 20m (sequence 512, batch 4), 124m (sequence 1024, batch 1)."""
    precision: tuple[str, ...] = ("fp32", "bf16")
    """fp32, bf16. nanoGPT's bf16 holds its weights in bf16, ours keeps float32 main weights and gradients."""
    rounds: int = 3
    """How often each contender is measured; the table shows medians."""
    steps: int = 6
    """Measured steps of a round."""
    compile: bool = False
    """Ours with --compile too."""
    child: Literal["", "ours", "nanogpt"] = ""
    """Internal: be one contender and print seconds per step."""


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    wrong = [s for s in flags.size if s not in SIZES] + [p for p in flags.precision if p not in ("fp32", "bf16")]
    if wrong:
        raise ConfigError(f"--size takes {' '.join(SIZES)}, --precision takes fp32 bf16; got {' '.join(wrong)}")
    if flags.nanogpt is not None and not (Path(flags.nanogpt) / "model.py").is_file():
        raise ConfigError(f"--nanogpt {flags.nanogpt} holds no model.py; git clone https://github.com/karpathy/nanoGPT")
    if flags.child:
        step = (ours if flags.child == "ours" else nanogpt)(flags, SIZES[flags.size[0]], flags.precision[0] == "bf16")
        print(json.dumps(measure(step, flags.steps)))
        return
    print("size  precision  contender   tokens/CPU-second   ours / nanoGPT")
    for size in flags.size:
        for precision in flags.precision:
            rows: dict[str, list[float]] = {}
            for _ in range(flags.rounds):
                for name in ("ours", *(["nanogpt"] if flags.nanogpt else [])):
                    rows.setdefault(name, []).append(_run(flags, name, size, precision))
            ratio = ""
            if flags.nanogpt:
                ratios = [a / b for a, b in zip(rows["ours"], rows["nanogpt"], strict=True)]
                ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            for name, values in rows.items():
                print(f"{size:5s} {precision:10s} {name:11s} {statistics.median(values):17.0f}   {ratio}", flush=True)
                ratio = ""


def _run(flags: Flags, name: str, size: str, precision: str) -> float:
    """Tokens per CPU-second of one contender in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--size", size, "--precision", precision]
    command += ["--steps", str(flags.steps)] + (["--nanogpt", flags.nanogpt] if flags.nanogpt else [])
    command += ["--compile"] if flags.compile else []
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return SIZES[size].seq * SIZES[size].batch / float(json.loads(done.stdout.splitlines()[-1]))


def measure(step: Callable[[], object], steps: int) -> float:
    """Median CPU seconds of a step, after two to warm up."""
    times = []
    for n in range(steps + 2):
        begin = time.process_time()
        step()
        if n >= 2:
            times.append(time.process_time() - begin)
    return statistics.median(times)


def ours(flags: Flags, size: Size, bf16: bool) -> Callable[[], object]:
    """One step of megapipe: one process, one microbatch."""
    model = ModelConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        max_position_embeddings=size.seq,
        padded_vocab_size=size.vocab,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        cross_entropy_loss_fusion=True,
    )
    train = TrainConfig(micro_batch_size=size.batch, seq_length=size.seq, train_iters=1, lr=1e-4, bf16=bf16)
    config = Config(model=model, parallel=ParallelConfig(), train=train)
    mesh, schedule = ProcessMesh.single(), build("1f1b", 1, 1)
    module = gpt_provider(model, partition(size.layers, schedule.placement)[0], mesh.tp)
    initialize(module, 1, mesh.tp)
    module = module.bfloat16() if bf16 else module
    if flags.compile:
        compile_layers(module)
    sys.path.insert(0, str(ROOT))
    from pretrain_gpt import forward_step

    pipeline = Pipeline(config, schedule, [module], forward_step, mesh, 0)
    optimizer = Optimizer([module], train, mesh)
    data = torch.randint(0, size.vocab, (1, size.batch, size.seq + 1))
    return lambda: train_step(pipeline, optimizer, data, 0, 1e-4)


def nanogpt(flags: Flags, size: Size, bf16: bool) -> Callable[[], object]:
    """One step of nanoGPT's own model with torch.compile and fused AdamW, as its train.py does it."""
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
    model: Any = GPT(config)
    model = model.bfloat16() if bf16 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model)
    tokens = torch.randint(0, size.vocab, (size.batch, size.seq + 1))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> None:
        _, loss = compiled(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        stop(error)
