"""Give Megatron-LM's P2PCommunicator to code written against it: its constructor and nine methods.

The executor does not use it: a program's messages go through `messenger`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.distributed.axis import ALONE, CPU, Axis
from megapipe.distributed.device import synchronize
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.messages.transport import InFlight, Op, P2PMode, Shape, Transport


class P2PCommunicator:
    """The sends and receives of one pipeline rank, with Megatron's interface.

    A `recv_` method returns a tensor from a neighbour, a `send_` method sends one, and a method
    with both words does both at once. Received tensors require gradients. The caller says where a
    neighbour is missing, by is_first_stage, is_last_stage, None or False. Otherwise the last rank's
    next rank is rank 0. Methods with is_first_stage or is_last_stage also take lists of shapes and
    tensors, with one for each message, as in Megatron. Then results are lists too.

    Args:
        pp_group: the pipeline's process group, or our Axis.
        config: a Megatron ModelParallelConfig. These fields are read:

            - pipeline_dtype: the type of received tensors.
            - variable_seq_lengths: the shape of each message is sent before it.
            - use_ring_exchange_p2p, batch_p2p_comm (Megatron's default): how messages are posted.
            - batch_p2p_sync: synchronize the device once a batch has been waited for. This guards
              against a race in batches of older PyTorch.
            - virtual_pipeline_model_parallel_size: only kept.
    """

    def __init__(self, pp_group: dist.ProcessGroup | Axis, config: Any) -> None:
        self.pp = axis_of(pp_group)
        self.pp_group = self.pp.group
        self.config = config
        # Megatron's defaults where a field is absent; a ring overrides a batch.
        mode = P2PMode.PLAIN
        if getattr(config, "batch_p2p_comm", True):
            mode = P2PMode.BATCHED
        if getattr(config, "use_ring_exchange_p2p", False):
            mode = P2PMode.RING
        self.transport = Transport(self.pp, mode)
        self.variable_seq_lengths = bool(getattr(config, "variable_seq_lengths", False))
        size = getattr(config, "virtual_pipeline_model_parallel_size", None)
        self.virtual_pipeline_model_parallel_size = size
        self.prev_rank = self.pp.ranks[self._peer("prev")]
        self.next_rank = self.pp.ranks[self._peer("next")]
        self._sync = getattr(config, "batch_p2p_sync", True) and mode is P2PMode.BATCHED

    @property
    def is_pp_first_stage(self) -> bool:
        return self.pp.rank == 0

    @property
    def is_pp_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    @property
    def total_stages(self) -> int:
        """Return the number of pipeline ranks, which Megatron calls stages here."""
        return self.pp.size

    @property
    def current_stage(self) -> int:
        """Return the position of this rank in the pipeline, from 0."""
        return self.pp.rank

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Return the previous stage's output; None on the first stage.

        Args:
            tensor_shapes: shape [s, b, h] of the output, or a list of the shapes of several.
            is_first_stage: whether this rank's stage is the first.
        """
        if is_first_stage:
            return _each(tensor_shapes, lambda shape: None)
        return _each(tensor_shapes, lambda shape: self._communicate(recv_prev=shape)[0])

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Receive the gradient of this stage's output from the next stage; None on the last stage.

        Args:
            tensor_shapes: shape [s, b, h] of the gradient, or a list of the shapes of several.
            is_last_stage: whether this rank's stage is the last.
        """
        if is_last_stage:
            return _each(tensor_shapes, lambda shape: None)
        return _each(tensor_shapes, lambda shape: self._communicate(recv_next=shape)[1])

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Send an output, or a list of them, to the next stage; do nothing if is_last_stage."""
        if not is_last_stage:
            _each(output_tensors, lambda x: self._communicate(send_next=x))

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Send a gradient, or a list, to the previous stage; do nothing if is_first_stage."""
        if not is_first_stage:
            _each(input_tensor_grads, lambda x: self._communicate(send_prev=x))

    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool
    ) -> Any:
        """Send an output to the next stage, and return its gradient from there.

        Args:
            output_tensors: the output, or a list of several.
            tensor_shapes: shape of the gradient, or a list of the shapes of several.
            is_last_stage: this rank's stage is the last: nothing is sent, and each result is None.
        """

        def call(x: Any, shape: Any) -> Any:
            if is_last_stage:
                return None
            return self._communicate(send_next=x, recv_next=shape)[1]

        return _each(output_tensors, call, tensor_shapes)

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool
    ) -> Any:
        """Send an input's gradient to the previous stage, and return the next input from there.

        Args:
            input_tensor_grads: the gradient, or a list of several.
            tensor_shapes: shape of the input, or a list of the shapes of several.
            is_first_stage: this rank's stage is the first: nothing is sent, and each result is
                None.
        """

        def call(x: Any, shape: Any) -> Any:
            if is_first_stage:
                return None
            return self._communicate(send_prev=x, recv_prev=shape)[0]

        return _each(input_tensor_grads, call, tensor_shapes)

    def send_forward_recv_forward(
        self,
        output_tensor: Tensor | None,
        recv_prev: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Send an output to the next rank, and receive the previous rank's output.

        Args:
            output_tensor: the output; None to send nothing.
            recv_prev: whether to receive.
            tensor_shape: shape of the received tensor.
            overlap_p2p_comm: return before the messages have completed.
        Returns: the received tensor or None; with overlap_p2p_comm (tensor, handles to wait for).
        """
        shape = tensor_shape if recv_prev else None
        got, _, handles = self._communicate(
            send_next=output_tensor, recv_prev=shape, wait=not overlap_p2p_comm
        )
        return (got, handles) if overlap_p2p_comm else got

    def send_backward_recv_backward(
        self,
        input_tensor_grad: Tensor | None,
        recv_next: bool,
        tensor_shape: Shape,
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Send a gradient to the previous rank, and receive the next rank's gradient.

        Args:
            input_tensor_grad: the gradient; None to send nothing.
            recv_next: whether to receive.
            tensor_shape: shape of the received tensor.
            overlap_p2p_comm: return before the messages have completed.
        Returns: the received tensor or None; with overlap_p2p_comm (tensor, handles to wait for).
        """
        shape = tensor_shape if recv_next else None
        _, got, handles = self._communicate(
            send_prev=input_tensor_grad, recv_next=shape, wait=not overlap_p2p_comm
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
        """Send and receive in all four directions at once.

        Args:
            output_tensor: sent to the next rank; None to send nothing.
            input_tensor_grad: sent to the previous rank; None to send nothing.
            recv_prev, recv_next: whether to receive from the previous and from the next rank.
            tensor_shape: shape of the received tensors.
        Returns: (output of the previous rank, gradient of the next rank). An element is None if its
            recv_prev or recv_next is False.
        """
        from_prev = tensor_shape if recv_prev else None
        from_next = tensor_shape if recv_next else None
        return self._communicate(
            send_next=output_tensor,
            send_prev=input_tensor_grad,
            recv_prev=from_prev,
            recv_next=from_next,
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
        """Post up to two sends and two receives, to and from the previous and the next rank.

        Args:
            send_next, send_prev: the tensors to send; None to send nothing.
            recv_prev, recv_next: shapes of the tensors to receive; None to receive nothing.
            wait: wait until all messages have arrived; otherwise return handles.
        Returns: (tensor from the previous rank, tensor from the next rank, handles). A tensor is
            None if it was not asked for. Handles are {argument's name, such as "recv_prev":
            handle}, and {} after a wait.
        """
        # Sends to the next rank pair with receives from the previous one before any gradient moves.
        # Two ranks that are both of each other's neighbours then agree on the order. Even ranks
        # send first: if sends block, the odd rank at the other end receives.
        wanted: dict[str, Tensor | Shape | None] = {
            "send_next": send_next,
            "recv_prev": recv_prev,
            "send_prev": send_prev,
            "recv_next": recv_next,
        }
        if self.pp.rank % 2:
            order = ("recv_prev", "send_next", "recv_next", "send_prev")
            wanted = {name: wanted[name] for name in order}
        present = {name: x for name, x in wanted.items() if x is not None}
        # The sender alone knows the shape, and a receive needs its buffer first.
        if self.variable_seq_lengths:
            shapes = {name: self._shape_op(name, x) for name, x in present.items()}
            for work in self.transport.post(list(shapes.values())):
                work.wait()
        posted = {}
        for name, x in present.items():
            peer = self._peer(name)
            if isinstance(x, Tensor):
                posted[name] = Op(True, peer, x.contiguous())
                continue
            if self.variable_seq_lengths:
                x = shapes[name].tensor.tolist()
            posted[name] = Op(False, peer, self._buffer(x))
        works = self.transport.post(list(posted.values()))
        sync = partial(synchronize, self.pp.device) if self._sync else None
        handles = {}
        for (name, op), work in zip(posted.items(), works, strict=True):
            handles[name] = InFlight(op.tensor, work, sync)
        if wait:
            for handle in handles.values():
                handle.wait()
        # Received tensors are leaves of the graphs that this rank makes of them.
        got = {n: op.tensor.requires_grad_() for n, op in posted.items() if not op.sends}
        return got.get("recv_prev"), got.get("recv_next"), {} if wait else handles

    def _peer(self, direction: str) -> int:
        """Return the pipeline rank of the neighbour in a direction, such as "recv_prev"."""
        step = 1 if direction.endswith("next") else -1
        return (self.pp.rank + step) % self.pp.size

    def _shape_op(self, direction: str, x: Tensor | Shape) -> Op:
        """Return the operation that sends or receives the shape of a message as a tensor.

        Args:
            direction: such as "recv_prev".
            x: the tensor whose shape is sent. For a receive, the expected shape, which is
                overwritten.
        """
        sends = isinstance(x, Tensor)
        shape = x.shape if isinstance(x, Tensor) else tuple(x)
        return Op(sends, self._peer(direction), torch.tensor(shape, device=self.pp.device))

    def _buffer(self, shape: Shape) -> Tensor:
        dtype = getattr(self.config, "pipeline_dtype", None)
        if dtype is None:
            raise ConfigError(
                "P2PCommunicator: config.pipeline_dtype must say the type of received tensors"
            )
        return torch.empty(tuple(shape), dtype=dtype, device=self.pp.device)


def axis_of(group: dist.ProcessGroup | Axis) -> Axis:
    """Return the `Axis` of a process group; an `Axis` is returned unchanged."""
    if isinstance(group, Axis):
        return group
    # Gloo also lists CUDA as a device, but its tensors live on CPUs here.
    cuda = torch.device("cuda")
    on_gpu = cuda in group._device_types and group._get_backend(cuda).name() != "gloo"
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # one that torch.distributed does not know
        ranks = tuple(range(group.size()))
    return Axis(group.rank(), group.size(), ranks, group, cuda if on_gpu else CPU)


def mesh_of(pg_collection: Any, pp: Axis | None = None) -> ProcessMesh:
    """Return the mesh that a Megatron ProcessGroupCollection describes.

    The collection must have the group tp, and may have pp, dp, cp and dp_cp.

    Args:
        pg_collection: the collection.
        pp: the axis of the pipeline; None for the collection's own. If the collection has none
            either, there is one pipeline rank.
    Raises: ConfigError for a collection without tp.
    """
    names = ("pp", "tp", "dp", "cp", "dp_cp")
    groups = {name: getattr(pg_collection, name, None) for name in names}
    axes: dict[str, Any] = {n: axis_of(group) for n, group in groups.items() if group is not None}
    # Only tp is asked for: a rank alone has groups of itself for all others.
    if "tp" not in axes:
        raise ConfigError(
            "pg_collection must have the group tp, and over several pipeline ranks pp"
        )
    device = axes["tp"].device
    axes["pp"] = pp or axes.get("pp", Axis(device=device))
    # Random numbers are drawn by the rank of dp, which dp_cp and cp determine.
    if "dp" not in axes and "dp_cp" in axes:
        both = axes["dp_cp"]
        cp = axes.get("cp", ALONE).size
        axes["dp"] = both if cp == 1 else Axis(both.rank // cp, both.size // cp, device=device)
    return ProcessMesh(**axes, device=device)


def _each(tensors: Any, call: Callable[..., Any], shapes: Any = None) -> Any:
    """Call a function for each tensor or shape of a list, and return the list of results.

    Args:
        tensors: a list, or a single tensor or shape. If neither `tensors` nor `shapes` is a list,
            the single result is returned.
        call: the function.
        shapes: the second argument of the function: a list with one shape for each tensor, or a
            single shape for a single tensor. None to call it with one argument.
    """
    many = _is_list(tensors)
    rows = [tensors if many else [tensors]]
    if shapes is not None:
        rows.append(shapes if _is_list(shapes) else [shapes])
        many = many or _is_list(shapes)
    results = [call(*row) for row in zip(*rows, strict=True)]
    return results if many else results[0]


def _is_list(x: Any) -> bool:
    """Return whether x is a list of tensors or shapes; a list of numbers is a single shape."""
    return isinstance(x, list) and not all(isinstance(n, int) for n in x)
