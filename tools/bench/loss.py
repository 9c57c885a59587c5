"""Memory and time of the output head with its loss: head, then loss of all logits, against both in
one operation.

python -m tools.bench.loss --tokens 4096 --vocab 131072 --hidden 1024

Each is a process of its own, forward and backward once to warm up and once measured; time is CPU
time, memory the growth of the process's peak beyond inputs, weight and gradient buffers.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megapipe.commands.ranks import run_ranks
from megapipe.distributed.axis import Axis
from megapipe.flags.parse import parse, run
from megapipe.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megapipe.tensor_parallel.fused_cross_entropy import vocab_parallel_linear_cross_entropy
from megapipe.tensor_parallel.linear import ColumnParallelLinear

TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Flags:
    """Compare a head with its loss in one operation with head and loss apart."""

    tokens: int = 4096
    """Tokens of a microbatch."""
    vocab: int = 131072
    """Rows of the head."""
    hidden: int = 1024
    """Model width."""
    rounds: int = 1
    """How often each is measured, in turns; the best of each counts."""


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    print(f"{flags.tokens} tokens, vocabulary {flags.vocab}, hidden {flags.hidden}, one thread")
    print("precision            plain            fused   fused / plain")
    for precision in TYPES:
        plain: list[tuple[float, float]] = []
        fused: list[tuple[float, float]] = []
        for _ in range(flags.rounds):
            plain += run_ranks(1, measure, flags, precision, False)
            fused += run_ranks(1, measure, flags, precision, True)
        for n, (what, unit) in enumerate((("time", "s"), ("peak", "MiB"))):
            one = min(row[n] for row in plain)
            other = min(row[n] for row in fused)
            cells = f"{one:8.2f} {unit:3} {other:12.2f} {unit:3} {other / one:12.3f}"
            print(f"{precision:9s}  {what} {cells}", flush=True)


def measure(flags: Flags, precision: str, fused: bool) -> tuple[float, float]:
    """CPU seconds and MiB of one forward and backward."""
    dtype = TYPES[precision]
    x = torch.randn(flags.tokens, flags.hidden, dtype=dtype).requires_grad_()
    head = ColumnParallelLinear(flags.hidden, flags.vocab, tp=Axis(), bias=False)
    head.weight.data = torch.empty(flags.vocab, flags.hidden, dtype=dtype).normal_(std=0.02)
    setattr(head.weight, "main_grad", torch.zeros(flags.vocab, flags.hidden))  # noqa: B010
    target = torch.randint(0, flags.vocab, (flags.tokens,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = 0.0
    for _ in range(2):
        begin = time.process_time()
        if fused:
            losses = vocab_parallel_linear_cross_entropy(x, head.weight, target, Axis())
        else:
            losses = vocab_parallel_cross_entropy(head(x), target, Axis())
        torch.autograd.backward(losses.mean())
        seconds = time.process_time() - begin
        del losses
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


if __name__ == "__main__":
    run(main)
