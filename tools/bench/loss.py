"""Memory and time of the output head with its loss: head, then loss of all logits, against both in
one operation.

python tools/bench/loss.py --tokens 4096 --vocab 131072 --hidden 1024

Each is a process of its own, forward and backward once to warm up and once measured; time is CPU
time, memory the growth of the process's peak beyond inputs, weight and gradient buffers.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megapipe.distributed.axis import Axis
from megapipe.flags.parse import parse, run
from megapipe.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megapipe.tensor_parallel.fused_cross_entropy import vocab_parallel_linear_cross_entropy
from megapipe.tensor_parallel.linear import ColumnParallelLinear


@dataclass(frozen=True)
class Flags:
    """Flags of this tool."""

    tokens: int = 4096
    """Tokens of a microbatch."""
    vocab: int = 131072
    """Rows of the head."""
    hidden: int = 1024
    """Model width."""
    precision: tuple[str, ...] = ("bf16", "fp32")
    """bf16, fp32."""
    rounds: int = 1
    """How often each is measured, in turns; the best of each counts."""
    child: Literal["", "plain", "fused"] = ""
    """Internal: measure one and print it."""


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    if flags.child:
        print(json.dumps(measure(flags)))
        return
    print(f"{flags.tokens} tokens, vocabulary {flags.vocab}, hidden {flags.hidden}, one thread")
    print("precision            plain            fused   fused / plain")
    for precision in flags.precision:
        rows: dict[str, list[tuple[float, float]]] = {"plain": [], "fused": []}
        for _ in range(flags.rounds):
            for kind, found in rows.items():
                found.append(_run(flags, kind, precision))
        seconds, peak = (
            {k: min(v[i] for v in found) for k, found in rows.items()} for i in range(2)
        )
        ratio = seconds["fused"] / seconds["plain"]
        print(
            f"{precision:9s}  time {seconds['plain']:8.2f} s {seconds['fused']:14.2f} s "
            f"{ratio:15.2f}"
        )
        ratio = peak["fused"] / peak["plain"]
        print(
            f"{precision:9s}  peak {peak['plain']:6.0f} MiB {peak['fused']:12.0f} MiB "
            f"{ratio:15.3f}",
            flush=True,
        )


def _run(flags: Flags, kind: str, precision: str) -> tuple[float, float]:
    command = [sys.executable, __file__, "--child", kind, "--precision", precision]
    command += [
        "--tokens",
        str(flags.tokens),
        "--vocab",
        str(flags.vocab),
        "--hidden",
        str(flags.hidden),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak


def measure(flags: Flags) -> tuple[float, float]:
    """CPU seconds and MiB of one forward and backward."""
    dtype = torch.bfloat16 if flags.precision[0] == "bf16" else torch.float32
    x = torch.randn(flags.tokens, flags.hidden, dtype=dtype).requires_grad_()
    head = ColumnParallelLinear(flags.hidden, flags.vocab, tp=Axis(), bias=False)
    head.weight.data = torch.empty(flags.vocab, flags.hidden, dtype=dtype).normal_(std=0.02)
    setattr(head.weight, "main_grad", torch.zeros(flags.vocab, flags.hidden))  # noqa: B010
    target = torch.randint(0, flags.vocab, (flags.tokens,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = 0.0
    for _ in range(2):
        begin = time.process_time()
        if flags.child == "fused":
            losses = vocab_parallel_linear_cross_entropy(x, head.weight, target, Axis())
        else:
            losses = vocab_parallel_cross_entropy(head(x), target, Axis())
        torch.autograd.backward(losses.mean())
        seconds = time.process_time() - begin
        del losses
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


if __name__ == "__main__":
    run(main)
