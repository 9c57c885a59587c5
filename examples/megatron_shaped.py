"""Code in Megatron-LM's shape: its forward_step, its train_step, its call of forward_backward_func, a torch optimizer.

What is new is how the mesh is made: ProcessMesh.create(ParallelConfig(...), device) at the start of the program.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.pipeline_parallel.contracts.forward_backward import get_forward_backward_func

WIDTH, LENGTH, MICROBATCHES = 4, 3, 4


class Part(nn.Module):
    """A stage as Megatron's models are: config, set_input_tensor; the first stage reads its tokens."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.config, self.input_tensor, draw = config, None, torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64))

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.input_tensor = input_tensor

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.input_tensor is None else self.input_tensor
        return x + torch.tanh(x @ self.weight)


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss = (output_tensor.square().mean(-1) * loss_mask).sum()
    return loss, loss_mask.sum().int(), {"lm loss": torch.stack((loss.detach(), loss_mask.sum()))}


def forward_step(data_iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
    data, mask = next(data_iterator)
    return model(data), partial(loss_func, mask)


def train_step(data_iterator: Any, model: list[nn.Module], optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    optimizer.zero_grad()
    losses_reduced: list[dict[str, Any]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=False,
        adjust_tensor_shapes_fn=None,
        force_all_reduce=False,
        p2p_communicator=None,
        pg_collection=None,
    )
    optimizer.step()
    return losses_reduced
