"""Give DeepSeek's `DualPipe` and `DualPipeV` by their names and signatures, so that a script only
changes its import line (github.com/deepseek-ai/DualPipe).

They run the tables dualpipe and dualpipe-v. Weight gradients that a module gives to
`WeightGradStore` wait for the table's W passes.
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
from megapipe.pipeline_parallel.contracts.deepseek import (
    PAIR,
    PairedStage,
    WeightGradStore,
    run_backward,
)
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

# DeepSeek keeps these two per process. A context variable is the same for a process of one rank,
# and lets ranks be threads.
_shapes: ContextVar[Sequence[Shape] | None] = ContextVar("p2p_tensor_shapes", default=None)
_dtype: ContextVar[torch.dtype | None] = ContextVar("p2p_tensor_dtype", default=None)


def set_p2p_tensor_shapes(shapes: Sequence[Shape]) -> None:
    """Set the shapes of the tensors that a stage sends to the next one, for this thread's steps."""
    _shapes.set([tuple(shape) for shape in shapes])


def set_p2p_tensor_dtype(dtype: torch.dtype) -> None:
    """Set the type of the tensors that a stage sends to the next one, for this thread's steps."""
    _dtype.set(dtype)


class _Pipe(nn.Module):
    """The base of DualPipe and DualPipeV. `step` runs all microbatches.

    Args:
        modules: this rank's two stages, in the order that DualPipe or DualPipeV asks for. If both
            are of one class with a method overlapped_forward_backward, that method runs pairs of
            passes.
        batch_dim: the dimension of inputs, labels and outputs that is cut into microbatches.
        process_group: the group of the pipeline's ranks; by default all ranks of torch.distributed.
        rank_mapping: for each rank of the group, its place in the pipeline; by default rank r has
            place r.
    Raises: ConfigError unless there are 2 modules, a process group, and in `rank_mapping` each
        place once.
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
        self.module = nn.ModuleList(modules)
        self.batch_dim = batch_dim
        name = type(self).__name__
        if len(self.module) != 2:
            raise ConfigError(f"{name} takes 2 modules of a rank, got {len(self.module)}")
        if process_group is None and not dist.is_initialized():
            raise ConfigError(f"{name} needs torch.distributed.init_process_group before it")
        axis = axis_of(process_group or dist.distributed_c10d._get_default_group())
        every = list(range(axis.size))
        places = every if rank_mapping is None else list(rank_mapping)
        if sorted(places) != every:
            raise ConfigError(
                f"rank_mapping must have each of 0 to {axis.size - 1} once, got {places}"
            )
        # From here on this rank and its peers are known by their places in the pipeline.
        self._of_group = tuple(places.index(place) for place in every)
        # Messages live where the model does. A model without parameters says nothing.
        device = next((param.device for param in self.module.parameters()), CPU)
        ranks = tuple(axis.ranks[n] for n in self._of_group)
        self._pp = replace(axis, rank=places[axis.rank], ranks=ranks, device=device)
        self.rank = self._pp.rank
        self.num_ranks = self._pp.size
        self.group = self._pp.group
        self.is_first_rank = self.rank == 0
        self.is_last_rank = self.rank == self.num_ranks - 1
        self._is_open = False

    def step(
        self,
        *inputs: Tensor | None,
        num_chunks: int = 0,
        criterion: Callable[..., Tensor] | None = None,
        labels: Sequence[Tensor | None] | Tensor | None = (),
        return_outputs: bool = False,
    ) -> tuple[Tensor | None, Tensor | tuple[Tensor, ...] | None]:
        """Run forward and backward of all microbatches; under torch.no_grad only the forwards.

        Gradients of the sum of losses are added to every parameter's `.grad`.

        Args:
            inputs: the batch for the model's first stage, on ranks that have one; else None.
            num_chunks: number of microbatches of the whole pipeline, both directions together.
            criterion, labels: criterion(*outputs, *labels) is the loss of a microbatch, on ranks
                that have a last stage. Inputs and labels are cut into microbatches here.
            return_outputs: also return the last stage's outputs.
        Returns: (losses, outputs), without a graph. Losses are one tensor with the loss of each
            microbatch in order; None without a last stage or a criterion. Outputs are one tensor,
            or a tuple if the module gives several. They are None without a last stage or
            `return_outputs`.
        Raises: ConfigError without shapes and type of messages. Also for training without a
            criterion, on a rank with a last stage. ScheduleError for numbers of ranks and
            microbatches that the table cannot have.
        """
        train = torch.is_grad_enabled()
        table, programs = _table(self._schedule, self.num_ranks, num_chunks, train)
        place = table.placement
        comm = self._messenger()
        stages = {}
        microbatches = num_chunks // place.num_chains
        # Asked of the class, as the method is the class's and runs one stage of each direction.
        one = type(self.module[0])
        overlaps = one is type(self.module[1]) and hasattr(one, PAIR)
        for number, module in zip(place.stages_on(self.rank), self.module, strict=True):
            last = place.is_last(number)
            if last and train and criterion is None:
                raise ConfigError(
                    f"{type(self).__name__}.step trains by a criterion, on each rank with a last "
                    "stage"
                )
            # Each direction of the pipeline has its own consecutive microbatches.
            begin = number // place.chain * microbatches
            stage = PairedStage(
                module,
                shapes=_of_messages().shapes,
                is_last=last,
                overlaps=overlaps,
                keeps_outputs=return_outputs and last,
            )
            if place.is_first(number):
                stage.inputs = self._cut(inputs, begin, microbatches)
            if last:
                stage.criterion = criterion
                stage.labels = self._cut(labels, begin, microbatches)
            stages[number] = stage
        # At the first step, when every rank is here: NCCL connects ranks at their first message.
        if not self._is_open:
            comm.open_links(place)
            self._is_open = True
        execute(programs[self.rank], place, stages, comm)
        # DeepSeek's callers get microbatches in order, whatever order the table ran them in.
        losses = []
        outputs = []
        for stage in stages.values():
            losses += [loss for _, loss in sorted(stage.losses.items())]
            outputs += [made for _, made in sorted(stage.outputs.items())]
        return torch.stack(losses) if losses else None, self._joined(outputs)

    def _messenger(self) -> Messenger:
        shapes, dtype = _of_messages()
        shape = shapes[0]
        if len(shapes) > 1:
            # Several tensors travel as one row of all their elements.
            shape = (sum(map(math.prod, shapes)),)
        return Messenger(self._pp, shape, dtype, transport=_Mapped(self._pp, self._of_group))

    def _cut(self, given: Any, begin: int, microbatches: int) -> Mapping[int, Sequence[Any]]:
        """Cut tensors along the batch dimension, and return {microbatch: [part of each tensor]}.

        Args:
            given: a tensor or several; None stands for a tensor that this rank does not have.
            begin: number of the first microbatch.
            microbatches: number of microbatches.
        """
        if given is None or isinstance(given, Tensor):
            given = (given,)
        parts = []
        for x in given:
            if x is None:
                parts.append([None] * microbatches)
            else:
                parts.append(x.tensor_split(microbatches, self.batch_dim))
        return {begin + n: [part[n] for part in parts] for n in range(microbatches)}

    def _joined(self, outputs: Sequence[Sequence[Tensor]]) -> Tensor | tuple[Tensor, ...] | None:
        joined = tuple(torch.cat(parts, self.batch_dim) for parts in zip(*outputs, strict=True))
        if not joined:
            return None
        return joined[0] if len(joined) == 1 else joined


class DualPipe(_Pipe):
    """A pipeline of two copies of the model in opposite directions (DeepSeek-V3 report, 3.2.1).

    The model is cut into p consecutive stages for an even number p of ranks. The first module of
    rank r is stage r, for batches that enter at rank 0. Its second module is stage p-1-r, for
    batches that enter at rank p-1. The caller gives each of these two ranks half of the inputs, and
    the labels for the other rank's half. The two copies of a stage are on ranks r and p-1-r. The
    caller adds their gradients, as with DeepSeek's class.
    """

    _schedule = "dualpipe"


class DualPipeV(_Pipe):
    """A pipeline of one copy of the model, from rank 0 to rank p-1 and back (Qi et al. 2025).

    The model is cut into 2p consecutive stages. The modules of rank r are stages r and 2p-1-r. The
    caller gives inputs and labels to rank 0.
    """

    _schedule = "dualpipe-v"


class _Messages(NamedTuple):
    shapes: Sequence[Shape]
    dtype: torch.dtype


def _of_messages() -> _Messages:
    shapes = _shapes.get()
    dtype = _dtype.get()
    if not shapes or dtype is None:
        raise ConfigError(
            "call set_p2p_tensor_shapes and set_p2p_tensor_dtype before a step, in the same thread"
        )
    return _Messages(shapes, dtype)


@lru_cache(maxsize=16)
def _table(
    name: str, ranks: int, microbatches: int, train: bool
) -> tuple[Schedule, tuple[Program, ...]]:
    table = build(name, ranks, microbatches)
    if not train:
        table = forward_only(table)
    return table, lower(table)


class _Mapped(Transport):
    """A transport over a group whose ranks are in another order than the pipeline.

    Operations name a peer by its place in the pipeline, and `post` translates it to the rank in the
    group.

    Args:
        pp: the pipeline axis, as for Transport.
        of_group: for each place in the pipeline, the rank in the group.
    """

    def __init__(self, pp: Any, of_group: Sequence[int]) -> None:
        # As DeepSeek posts them. A batch needs no links, which a caller's group does not have.
        super().__init__(pp, P2PMode.BATCHED)
        self._of_group = of_group

    def post(self, ops: list[Op]) -> Sequence[Handle]:
        return super().post([op._replace(peer=self._of_group[op.peer]) for op in ops])
