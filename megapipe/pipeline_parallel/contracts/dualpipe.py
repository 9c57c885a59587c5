"""DeepSeek's `DualPipe` and `DualPipeV` (github.com/deepseek-ai/DualPipe) by their names and signatures, on the tables
dualpipe and dualpipe-v: a script changes its import line.

Weight gradients that a module gives to `WeightGradStore` wait for the table's W passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megapipe.distributed.axis import CPU
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.contracts.deepseek import PAIR, PairedStage, WeightGradStore, run_backward
from megapipe.pipeline_parallel.contracts.p2p import axis_of
from megapipe.pipeline_parallel.execute import execute
from megapipe.pipeline_parallel.messages.messenger import Messenger
from megapipe.pipeline_parallel.messages.transport import Handle, Op, P2PMode, Shape, Transport
from megapipe.schedule import Program, Schedule, build, forward_only, lower

__all__ = [
    "DualPipe",
    "DualPipeV",
    "WeightGradStore",
    "run_backward",
    "set_p2p_tensor_dtype",
    "set_p2p_tensor_shapes",
]

_shapes: ContextVar[Sequence[Shape] | None] = ContextVar("p2p_tensor_shapes", default=None)
_dtype: ContextVar[torch.dtype | None] = ContextVar("p2p_tensor_dtype", default=None)


def set_p2p_tensor_shapes(shapes: Sequence[Shape]) -> None:
    """Set the shapes of the tensors that a stage gives the next one, for the steps of this thread from now on."""
    _shapes.set([tuple(shape) for shape in shapes])


def set_p2p_tensor_dtype(dtype: torch.dtype) -> None:
    """The one type of them all."""
    _dtype.set(dtype)


class _Pipe(nn.Module):
    """The base of both classes.

    Args:
        modules: this rank's two stages, in the order of the class. If both are of one class that has
            overlapped_forward_backward, that runs the pairs, see pipeline_parallel.pairs.
        batch_dim: dimension of inputs, labels and outputs that is cut into microbatches.
        process_group: the pipeline's ranks; default torch.distributed's own.
        rank_mapping: of each rank of the group its place in the pipeline; default the same.
    """

    _schedule: str

    def __init__(
        self,
        modules: Sequence[nn.Module],
        batch_dim: int = 0,
        process_group: dist.ProcessGroup | None = None,
        rank_mapping: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.module, self.batch_dim = nn.ModuleList(modules), batch_dim
        if len(self.module) != 2:
            raise ConfigError(f"{type(self).__name__} takes 2 modules of a rank, got {len(self.module)}")
        if process_group is None and not dist.is_initialized():
            raise ConfigError(f"{type(self).__name__} needs torch.distributed.init_process_group before it")
        axis = axis_of(process_group or dist.distributed_c10d._get_default_group())
        places = list(range(axis.size)) if rank_mapping is None else list(rank_mapping)
        if sorted(places) != list(range(axis.size)):
            raise ConfigError(f"rank_mapping must have each of 0 to {axis.size - 1} once, got {places}")
        self._of_group = tuple(places.index(place) for place in range(axis.size))
        device = next((param.device for param in self.module.parameters()), CPU)
        ranks = tuple(axis.ranks[n] for n in self._of_group)
        self._pp = replace(axis, rank=places[axis.rank], ranks=ranks, device=device)
        self.rank, self.num_ranks, self.group = self._pp.rank, self._pp.size, self._pp.group
        self.is_first_rank, self.is_last_rank = self.rank == 0, self.rank == self.num_ranks - 1
        self._is_open = False

    def step(
        self,
        *inputs: Tensor | None,
        num_chunks: int = 0,
        criterion: Callable[..., Tensor] | None = None,
        labels: Sequence[Tensor | None] | Tensor | None = (),
        return_outputs: bool = False,
    ) -> tuple[Tensor | None, Tensor | tuple[Tensor, ...] | None]:
        """Forward and backward of all microbatches, under torch.no_grad the forwards alone.

        Args:
            inputs: of this rank's first stage, where it has one; cut into microbatches.
            num_chunks: microbatches of the whole pipeline.
            criterion, labels: criterion(*outputs, *labels) is the loss of a microbatch of this rank's last stage, where
                it has one.
            return_outputs: also the last stage's outputs.
        Returns: losses by microbatch where a last stage is here, else None; outputs, one tensor or a tuple. Both
            without a graph. Gradients of the sum of losses are added to every parameter's `.grad`.
        Raises: ConfigError without shapes and type of messages, or criterion; ScheduleError for other numbers of ranks
            and microbatches than the table can have.
        """
        train = torch.is_grad_enabled()
        table, programs = _table(self._schedule, self.num_ranks, num_chunks, train)
        comm = self._messenger()
        stages, microbatches = {}, num_chunks // table.placement.num_chains
        overlaps = type(self.module[0]) is type(self.module[1]) and hasattr(type(self.module[0]), PAIR)
        for number, module in zip(table.placement.stages_on(self.rank), self.module, strict=True):
            first, last = table.placement.is_first(number), table.placement.is_last(number)
            if last and train and criterion is None:
                raise ConfigError(f"{type(self).__name__}.step trains by a criterion, on each rank with a last stage")
            begin = number // table.placement.chain * microbatches
            stages[number] = PairedStage(
                module,
                self._cut(inputs, begin, microbatches) if first else None,
                criterion if last else None,
                self._cut(labels, begin, microbatches) if last else None,
                shapes=_of_messages().shapes,
                is_last=last,
                overlaps=overlaps,
                keeps_outputs=return_outputs and last,
            )
        if not self._is_open:
            comm.open_links(table.placement)
            self._is_open = True
        execute(programs[self.rank], table.placement, stages, comm)
        losses = [loss for stage in stages.values() for _, loss in sorted(stage.losses.items())]
        outputs = [made for stage in stages.values() for _, made in sorted(stage.outputs.items())]
        return torch.stack(losses) if losses else None, self._joined(outputs)

    def _messenger(self) -> Messenger:
        shapes, dtype = _of_messages()
        shape = shapes[0] if len(shapes) == 1 else (sum(map(math.prod, shapes)),)
        return Messenger(self._pp, shape, dtype, transport=_Mapped(self._pp, self._of_group))

    def _cut(self, given: Any, begin: int, microbatches: int) -> Mapping[int, Sequence[Any]]:
        """(tensors or None, ...) of all microbatches from `begin` on -> of each."""
        given = (given,) if given is None or isinstance(given, Tensor) else given
        parts = [[x] * microbatches if x is None else x.tensor_split(microbatches, self.batch_dim) for x in given]
        return {begin + n: [part[n] for part in parts] for n in range(microbatches)}

    def _joined(self, outputs: Sequence[Sequence[Tensor]]) -> Tensor | tuple[Tensor, ...] | None:
        joined = tuple(torch.cat(parts, self.batch_dim) for parts in zip(*outputs, strict=True))
        return (joined[0] if len(joined) == 1 else joined) if joined else None


class DualPipe(_Pipe):
    """Two copies of the model in opposite directions (DeepSeek-V3 report, sec. 3.2.1), on an even number of p ranks.

    modules of rank r: slice r of the model, for what enters at the first rank, and slice p-1-r, for what enters at the
    last. Either rank is given its half of the batch, and the labels of the other's. Gradients of the two copies of a
    slice, on ranks r and p-1-r, are left to the caller to add, as DeepSeek does.
    """

    _schedule = "dualpipe"


class DualPipeV(_Pipe):
    """One copy of the model down and up the p ranks (Qi et al. 2025).

    modules of rank r: slices r and 2p-1-r of the model. Rank 0 is given the batch and the labels.
    """

    _schedule = "dualpipe-v"


class _Messages(NamedTuple):
    shapes: Sequence[Shape]
    dtype: torch.dtype


def _of_messages() -> _Messages:
    shapes, dtype = _shapes.get(), _dtype.get()
    if not shapes or dtype is None:
        raise ConfigError("call set_p2p_tensor_shapes and set_p2p_tensor_dtype before a step, in the same thread")
    return _Messages(shapes, dtype)


@lru_cache(maxsize=16)
def _table(name: str, ranks: int, microbatches: int, train: bool) -> tuple[Schedule, tuple[Program, ...]]:
    table = build(name, ranks, microbatches)
    table = table if train else forward_only(table)
    return table, lower(table)


class _Mapped(Transport):
    """Messages by places of the pipeline over a group that has its ranks in another order."""

    def __init__(self, pp: Any, of_group: Sequence[int]) -> None:
        super().__init__(pp, P2PMode.BATCHED)
        self._of_group = of_group

    def post(self, ops: list[Op]) -> Sequence[Handle]:
        return super().post([op._replace(peer=self._of_group[op.peer]) for op in ops])
