"""Measure context parallelism on one layer: balance, bytes held, bytes sent, CPU time.

    python tools/bench/context.py --tokens 8192 32768 --ranks 1 2 4
    python tools/bench/context.py --balance --tokens 32768 --ranks 2 4 8

Ranks are threads on a CPU, so times are seconds of the process over all ranks; bytes are those of a
rank.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, NamedTuple

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.distributed.axis import CPU, Axis, Pending
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.tokens import Cut, Documents, positions
from megapipe.flags.parse import parse, run
from megapipe.models.layer import TransformerLayer
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan.context import context_bytes
from megapipe.plan.pieces import pieces
from megapipe.tensor_parallel.rng import MicrobatchContext, initialize


@dataclass(frozen=True)
class Counted(Axis):
    """An axis that counts the bytes sent in a ring: a gather sends its part c - 1 times."""

    sent: list[int] = field(default_factory=list, compare=False)

    def start_shift(self, x: Tensor, channel: int = 0, into: Tensor | None = None) -> Pending:
        self.sent.append(x.nbytes)
        return super().start_shift(x, channel, into)

    def start_all_gather(self, x: Tensor, into: Tensor | None = None) -> Pending:
        self.sent.append((self.size - 1) * x.nbytes)
        return super().start_all_gather(x)

    def start_reduce_scatter(self, x: Tensor, into: Tensor | None = None) -> Pending:
        self.sent.append((self.size - 1) * x.nbytes // self.size)
        return super().start_reduce_scatter(x)

    def all_to_all(self, x: Tensor) -> Tensor:
        self.sent.append((self.size - 1) * x.nbytes // self.size)
        return super().all_to_all(x)


class Measured(NamedTuple):
    """Bytes of one rank: held between forward and backward, and sent in each."""

    held: int
    forward: int
    backward: int


def layer_of(mesh: ProcessMesh, model: ModelConfig, tokens: int, batch: int = 1) -> Measured:
    """One layer forward and backward, float32. tokens: of a whole sequence."""
    layer = TransformerLayer(model, mesh.tp, 0)
    initialize(layer, 1, mesh.tp)
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    cp = Counted(**{f.name: getattr(mesh.cp, f.name) for f in fields(Axis)})
    x = torch.randn(tokens // cp.size, batch, model.hidden).requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept.append(tensor)
        return tensor

    with (
        MicrobatchContext(0, 0, cp=cp).active(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        y = layer(x)
    held = sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in kept)}.values())
    kept.clear()
    forward = sum(cp.sent)
    y.backward(torch.ones_like(y))
    return Measured(held, forward, sum(cp.sent) - forward)


def work(tokens: int, ranks: int, documents: Documents | None = None) -> list[int]:
    """Keys that the tokens of each rank see, over all sequences."""
    return [int((positions(tokens, Cut(r, ranks), documents, CPU) + 1).sum()) for r in range(ranks)]


def spread(counts: Iterable[int]) -> float:
    """Return by what fraction the largest value of a rank exceeds the mean."""
    found = list(counts)
    return max(found) * len(found) / sum(found) - 1


def drawn(tokens: int, seed: int, mean: int) -> Documents:
    """A sequence of documents of exponential lengths."""
    rng, lengths = random.Random(seed), [0]
    while sum(lengths) < tokens:
        lengths.append(min(1 + int(rng.expovariate(1 / mean)), tokens - sum(lengths)))
    return Documents((tuple(lengths[1:]),), isolate=True, restart=True)


def balance(tokens: int, ranks: int) -> str:
    whole = spread(work(tokens, ranks))
    found = [
        (mean, [spread(work(tokens, ranks, drawn(tokens, seed, mean))) for seed in range(20)])
        for mean in (tokens // 64, tokens // 8)
    ]
    texts = [
        f"documents of {mean}: {sum(x) / len(x):.1%} on average, {max(x):.1%} at most"
        for mean, x in found
    ]
    return f"{tokens} tokens, c {ranks}: most over mean {whole:.2%}; {'; '.join(texts)}"


@dataclass(frozen=True)
class Flags:
    """Compare the memory, messages and time of context parallelism in one layer with the plan's."""

    tokens: tuple[int, ...] = (8192, 32768)
    """Lengths of the sequence."""
    ranks: tuple[int, ...] = (1, 2, 4)
    """Sizes of context parallelism."""
    ways: tuple[Literal["p2p", "all_gather", "a2a"], ...] = ("p2p", "all_gather", "a2a")
    """As --cp-comm-type."""
    hidden: int = 128
    """Width."""
    heads: int = 4
    """Attention heads."""
    groups: int = 4
    """Key and value heads."""
    balance: bool = False
    """Count causal work instead."""


def rows(args: Flags) -> Iterator[str]:
    yield (
        "tokens  c  way         held MiB (plan)     sent MiB forward (plan)  backward (plan)     "
        "CPU us per token"
    )
    for tokens in args.tokens:
        for c in args.ranks:
            for way in args.ways[: 1 if c == 1 else None]:
                if way == "a2a" and (args.heads % c or args.groups % c):
                    continue
                model = ModelConfig(
                    num_layers=1,
                    hidden_size=args.hidden,
                    num_attention_heads=args.heads,
                    group_query_attention=True,
                    num_query_groups=args.groups,
                    max_position_embeddings=tokens,
                    padded_vocab_size=1,
                    attention_dropout=0.0,
                    hidden_dropout=0.0,
                    cp_comm_type=(way,),
                )

                def one(
                    mesh: ProcessMesh, model: ModelConfig = model, tokens: int = tokens
                ) -> Measured:
                    return layer_of(mesh, model, tokens)

                began = time.process_time()
                found = run_threads(one, cp=c, timeout_s=3600)[0]
                us = (time.process_time() - began) / tokens * 1e6
                held = pieces(model, tokens, cp=c).layers[0].held
                sent = context_bytes(model, tokens, ranks=c)
                cells = [
                    f"{x / 2**20:8.3f} ({y / 2**20:8.3f})"
                    for x, y in zip(found, (held, *sent), strict=True)
                ]
                yield f"{tokens:6}  {c}  {way if c > 1 else '-':10}  {'  '.join(cells)}  {us:8.1f}"


def main(argv: Sequence[str]) -> None:
    args = parse(Flags, argv)
    torch.set_num_threads(1)
    if args.balance:
        print(
            *(balance(tokens, c) for tokens in args.tokens for c in args.ranks if c > 1), sep="\n"
        )
        return
    for row in rows(args):
        print(row, flush=True)


if __name__ == "__main__":
    run(main)
