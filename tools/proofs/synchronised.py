"""Check when a table lets Megatron's DistributedDataParallel sum gradients: each chunk once, whole.

A stand-in takes down a chunk's gradient where the original would begin its sum over data parallel:
when it arrives outside no_sync, or when grad_sync_func is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.contracts.forward_backward import get_forward_backward_func
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import Schedule

WAYS = ("by chunk", "one for all", "grad_sync_func")
"""no_sync_func is a list, is one function for all chunks, or the chunks are summed by a function
that is called.
"""


class Chunk(nn.Module):
    """A stage of one weight.

    Attributes:
        summed: the gradients that would have been summed.
    """

    def __init__(self, stage: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(stage)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=draw, dtype=torch.float64))
        self.summed: list[Tensor] = []
        self.is_open = True
        arrives = self.weight.register_post_accumulate_grad_hook
        arrives(lambda _: self.sum() if self.is_open else None)  # type: ignore[no-untyped-call]

    def sum(self) -> None:
        assert self.weight.grad is not None
        self.summed.append(self.weight.grad.clone())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.is_open = False
        yield
        self.is_open = True

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.x = torch.ones(2, 1, 4, dtype=torch.float64) if x is None else x

    def forward(self) -> Tensor:
        return self.x + torch.tanh(self.x @ self.weight)


@contextmanager
def _all_off(chunks: Sequence[Chunk]) -> Iterator[None]:
    with ExitStack() as off:
        for chunk in chunks:
            off.enter_context(chunk.no_sync())
        yield


def _asked(way: str, chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Return the settings of a Megatron config for one way of summing gradients."""

    def sum_now(params: Iterable[nn.Parameter], chunk: Chunk) -> None:
        assert chunk.is_open, "no_sync is still on"
        assert list(params) == [chunk.weight], "these are another chunk's"
        chunk.sum()

    said: dict[str, Any] = {"no_sync_func": [chunk.no_sync for chunk in chunks]}
    if way == "one for all":
        said = {"no_sync_func": partial(_all_off, chunks)}
    if way == "grad_sync_func":
        said["grad_sync_func"] = [partial(sum_now, chunk=chunk) for chunk in chunks]
    return said


def too_early(table: Schedule, way: str) -> list[str]:
    """The chunks that are not summed once, or not as they are in the end; those without
    microbatches never are.
    """

    def rank(mesh: ProcessMesh) -> list[str]:
        stages = table.placement.stages_on(mesh.pp.rank)
        chunks = [Chunk(stage) for stage in stages]
        step = get_forward_backward_func(
            mesh=mesh,
            schedule=table,
            config=SimpleNamespace(hidden_size=4, sequence_parallel=False, **_asked(way, chunks)),
        )
        step(
            forward_step_func=lambda _, model: (model(), lambda out: (out.square().sum(), {})),
            data_iterator=[None] * len(chunks),
            model=chunks,
            num_microbatches=table.num_microbatches,
            seq_length=2,
            micro_batch_size=1,
        )
        return [
            f"{table.name}, {way}: stage {stage} summed {len(chunk.summed)} times"
            for stage, chunk in zip(stages, chunks, strict=True)
            if chunk.weight.grad is not None
            and not (len(chunk.summed) == 1 and torch.equal(chunk.summed[0], chunk.weight.grad))
        ]

    return [problem for problems in run_threads(rank, pp=len(table.ranks)) for problem in problems]
