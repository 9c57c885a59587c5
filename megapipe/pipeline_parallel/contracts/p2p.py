"""Megatron-LM's P2PCommunicator, for code written against it: its constructor and its nine methods, by its names.

The executor does not use it: a program's messages go through `messenger`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.distributed.axis import CPU, Axis
from megapipe.distributed.device import synchronize
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.messages.transport import InFlight, Op, P2PMode, Shape, Transport


class P2PCommunicator:
    """Sends and receives of one pipeline rank, called in Megatron's order.

    Args:
        pp_group: the pipeline's process group, or our Axis.
        config: of a Megatron ModelParallelConfig these are heeded: pipeline_dtype, the type of what is received;
            variable_seq_lengths, the shape of each message is sent before it; use_ring_exchange_p2p and batch_p2p_comm
            (Megatron's default), how messages are posted; batch_p2p_sync, after a batch has been waited for the device
            is synchronized (a guard against a race in batches of older PyTorch).
            virtual_pipeline_model_parallel_size is only kept.
    """

    def __init__(self, pp_group: dist.ProcessGroup | Axis, config: Any) -> None:
        self.pp = axis_of(pp_group)
        self.pp_group, self.config = self.pp.group, config
        mode = P2PMode.BATCHED if getattr(config, "batch_p2p_comm", True) else P2PMode.PLAIN
        if getattr(config, "use_ring_exchange_p2p", False):
            mode = P2PMode.RING
        self.transport = Transport(self.pp, mode)
        self.variable_seq_lengths = bool(getattr(config, "variable_seq_lengths", False))
        self.virtual_pipeline_model_parallel_size = getattr(config, "virtual_pipeline_model_parallel_size", None)
        self.prev_rank, self.next_rank = (self.pp.ranks[(self.pp.rank + step) % self.pp.size] for step in (-1, 1))
        self._sync = getattr(config, "batch_p2p_sync", True) and mode is P2PMode.BATCHED

    @property
    def is_pp_first_stage(self) -> bool:
        return self.pp.rank == 0

    @property
    def is_pp_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    @property
    def total_stages(self) -> int:
        """Ranks of the pipeline, in Megatron's word."""
        return self.pp.size

    @property
    def current_stage(self) -> int:
        """The place of this rank among them."""
        return self.pp.rank

    # A neighbour that a first or last stage lacks makes that half of a call nothing. Where Megatron takes lists, of a
    # shape or tensor per message, a single one comes back single.

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """The output of the stage before, [s, b, h] with requires_grad; None on the first stage."""
        return _each(tensor_shapes, lambda x: self._communicate(recv_prev=None if is_first_stage else x)[0])

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """The gradient from the stage after, [s, b, h]; None on the last stage."""
        return _each(tensor_shapes, lambda x: self._communicate(recv_next=None if is_last_stage else x)[1])

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """An output to the stage after; nothing on the last stage."""
        _each(output_tensors, lambda x: self._communicate(send_next=None if is_last_stage else x))

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """A gradient to the stage before; nothing on the first stage."""
        _each(input_tensor_grads, lambda x: self._communicate(send_prev=None if is_first_stage else x))

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Both with the stage after: an output goes, a gradient comes. None on the last stage."""
        return _each(
            output_tensors,
            lambda x, shape: None if is_last_stage else self._communicate(send_next=x, recv_next=shape)[1],
            tensor_shapes,
        )

    def send_backward_recv_forward(self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Both with the stage before: a gradient goes, an output comes. None on the first stage."""
        return _each(
            input_tensor_grads,
            lambda x, shape: None if is_first_stage else self._communicate(send_prev=x, recv_prev=shape)[0],
            tensor_shapes,
        )

    def send_forward_recv_forward(
        self, output_tensor: Tensor | None, recv_prev: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> Any:
        """An output to the next rank, one from the previous; with overlap_p2p_comm (tensor, handles to wait for)."""
        got, _, handles = self._communicate(
            send_next=output_tensor, recv_prev=tensor_shape if recv_prev else None, wait=not overlap_p2p_comm
        )
        return (got, handles) if overlap_p2p_comm else got

    def send_backward_recv_backward(
        self, input_tensor_grad: Tensor | None, recv_next: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> Any:
        """A gradient to the previous rank, one from the next; with overlap_p2p_comm (tensor, handles to wait for)."""
        _, got, handles = self._communicate(
            send_prev=input_tensor_grad, recv_next=tensor_shape if recv_next else None, wait=not overlap_p2p_comm
        )
        return (got, handles) if overlap_p2p_comm else got

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Tensor | None,
        input_tensor_grad: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[Tensor | None, Tensor | None]:
        """All four directions at once: (output of the previous rank, gradient of the next)."""
        return self._communicate(
            send_next=output_tensor,
            send_prev=input_tensor_grad,
            recv_prev=tensor_shape if recv_prev else None,
            recv_next=tensor_shape if recv_next else None,
        )[:2]

    def _communicate(
        self,
        *,
        send_next: Tensor | None = None,
        send_prev: Tensor | None = None,
        recv_prev: Shape | None = None,
        recv_next: Shape | None = None,
        wait: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, dict[str, InFlight]]:
        """(from the previous rank, from the next, handles by direction, empty if waited for)."""
        wanted = {"send_next": send_next, "recv_prev": recv_prev, "send_prev": send_prev, "recv_next": recv_next}
        # Sends to the next rank pair with receives from the previous before any gradient moves, so two ranks that are
        # both of each other's neighbours agree; even ranks send first, so one of two blocking ranks always receives.
        order = ("send_next", "recv_prev", "send_prev", "recv_next")
        if self.pp.rank % 2:
            order = ("recv_prev", "send_next", "recv_next", "send_prev")
        present = {name: x for name in order if (x := wanted[name]) is not None}
        shapes: dict[str, Shape] = {name: x.shape if isinstance(x, Tensor) else x for name, x in present.items()}
        if self.variable_seq_lengths:
            ops = {name: self._shape_op(name, x) for name, x in present.items()}
            for work in self.transport.post(list(ops.values())):
                work.wait()
            shapes = {name: op.tensor.tolist() for name, op in ops.items()}
        posted = {
            name: Op(True, self._peer(name), x.contiguous())
            if isinstance(x, Tensor)
            else Op(False, self._peer(name), self._buffer(shapes[name]))
            for name, x in present.items()
        }
        works = self.transport.post(list(posted.values()))
        sync = partial(synchronize, self.pp.device) if self._sync else None
        handles = {n: InFlight(op.tensor, work, sync) for (n, op), work in zip(posted.items(), works, strict=True)}
        if wait:
            for handle in handles.values():
                handle.wait()
        got = [posted[n].tensor.requires_grad_() if n in posted else None for n in ("recv_prev", "recv_next")]
        return got[0], got[1], {} if wait else handles

    def _peer(self, direction: str) -> int:
        return (self.pp.rank + (1 if direction.endswith("next") else -1)) % self.pp.size

    def _shape_op(self, direction: str, x: Tensor | Shape) -> Op:
        sends = isinstance(x, Tensor)
        numbers = torch.tensor(x.shape if isinstance(x, Tensor) else tuple(x), device=self.pp.device)
        return Op(sends, self._peer(direction), numbers)

    def _buffer(self, shape: Shape) -> Tensor:
        dtype = getattr(self.config, "pipeline_dtype", None)
        if dtype is None:
            raise ConfigError("P2PCommunicator: config.pipeline_dtype must say the type of what is received")
        return torch.empty(tuple(shape), dtype=dtype, device=self.pp.device)


def axis_of(group: dist.ProcessGroup | Axis) -> Axis:
    """Return a process group as an axis, and an axis as it is.

    The group's tensors live on CPUs if gloo moves them, which says that it could GPUs' too.
    """
    if isinstance(group, Axis):
        return group
    cuda = torch.device("cuda")
    on_gpu = cuda in group._device_types and group._get_backend(cuda).name() != "gloo"
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # one that torch.distributed does not know
        ranks = tuple(range(group.size()))
    return Axis(group.rank(), group.size(), ranks, group, cuda if on_gpu else CPU)


def _each(tensors: Any, call: Callable[..., Any], shapes: Any = None) -> Any:
    """`call` for each item of a list, or of a single item its own result."""
    many = isinstance(tensors, list) and not all(isinstance(x, int) for x in tensors)
    items = tensors if many else [tensors]
    if shapes is None:
        results = [call(x) for x in items]
    else:
        per = shapes if isinstance(shapes, list) and not all(isinstance(x, int) for x in shapes) else [shapes]
        many = many or per is shapes
        results = [call(x, shape) for x, shape in zip(items, per, strict=True)]
    return results if many else results[0]
