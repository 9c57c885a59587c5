"""A module with DeepSeek's contract for DualPipe's pairs, trained by any schedule.

Real models put the all-to-all of one microbatch beside the matrix products of the other; this toy only takes turns.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.contracts.deepseek import paired_step
from megapipe.schedule import build

BLOCKS, MICROBATCHES, WIDTH = 8, 10, 6


class Stage(nn.Module):
    """Blocks x + gelu(x W); a block has the same weights wherever it lives."""

    def __init__(self, blocks: Iterable[int]) -> None:
        super().__init__()
        shape, draw = (WIDTH, WIDTH), torch.Generator()
        weights = {str(n): torch.randn(shape, generator=draw.manual_seed(n), dtype=torch.float64) for n in blocks}
        self.blocks = nn.ParameterDict(weights)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.blocks.values():
            x = x + gelu(x @ weight)
        return x

    @classmethod
    def overlapped_forward_backward(cls, module0: Any, inputs0: Any, criterion0: Any, labels0: Any, *other: Any) -> Any:
        _module1, loss1, outputs1, grads1 = other
        (x,) = inputs0
        for i, weight in enumerate(module0.blocks.values()):
            x = x + gelu(x @ weight)
            if i == 0:  # between two blocks of the one, the backward of the other
                loss1.backward() if loss1 is not None else torch.autograd.backward(outputs1, grads1)
        return [x], None if criterion0 is None else criterion0(x, *labels0)


def train(mesh: ProcessMesh, name: str) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """One step on this rank: the losses that are known here, by microbatch, and gradients, by block."""
    data = torch.randn(2, MICROBATCHES, 3, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    xs, ys = ([[x] for x in side] for side in data)
    place = build(name, mesh.pp.size, MICROBATCHES).placement
    each = BLOCKS // place.chain
    modules = [Stage(range(n * each, n * each + each)) for n in map(place.position, place.stages_on(mesh.pp.rank))]
    shape, mse = (3, WIDTH), nn.MSELoss()
    losses = paired_step(mesh, name, modules, inputs=xs, labels=ys, criterion=mse, shape=shape, dtype=data.dtype)
    return losses, {n: w.grad for module in modules for n, w in module.blocks.items() if w.grad is not None}
