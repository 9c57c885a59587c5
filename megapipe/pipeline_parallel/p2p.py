"""Messages between pipeline ranks: posted as lists of operations in one of three modes, waited for when used.

Two ways in: `exchange` for the executor's messages, Megatron's nine methods for code written against Megatron-LM.
Between two ranks messages have no names, only an order; every path here keeps that order the same at both ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.device import synchronize
from megapipe.pipeline_parallel.transport import InFlight, Op, P2PMode, Transport
from megapipe.schedule import Message, Pass, Placement

Shape = Sequence[int]


class P2PCommunicator:
    """Sends and receives of one pipeline rank.

    Args:
        pp: the pipeline axis.
        shape, dtype: of every message, hidden states [s, b, h] and their gradients.
        transport: how they are posted; plain by default.
        variable_seq_lengths: the shape of each message is sent before it; `shape` then says only its dimensions.
        batch_p2p_sync: after a batch has been waited for, synchronize the device (Megatron's guard against a race in
            batches of older PyTorch).
        sends_in_flight: how many sends may be under way before the oldest is waited for; bounds the memory they hold.
            Gloo does not say when a tensor has left, so it is also how many stay that left long ago.
    """

    def __init__(
        self,
        pp: Axis,
        shape: Shape,
        dtype: torch.dtype,
        *,
        transport: Transport | None = None,
        variable_seq_lengths: bool = False,
        batch_p2p_sync: bool = False,
        sends_in_flight: int = 16,
    ) -> None:
        self.pp, self.shape, self.dtype = pp, tuple(shape), dtype
        self.transport = transport or Transport(pp)
        self.variable_seq_lengths, self.sends_in_flight = variable_seq_lengths, sends_in_flight
        self._sync = batch_p2p_sync and self.transport.mode is P2PMode.BATCHED
        self.sends: deque[tuple[Message, InFlight]] = deque()

    @property
    def receives_ahead(self) -> int:
        """How many receives may be posted before their turn; one of unknown size cannot be."""
        return 0 if self.variable_seq_lengths else self.transport.receives_ahead

    def open_links(self, placement: Placement) -> None:
        """Use every link of a placement once, in one order on all ranks.

        NCCL makes a communicator at first use; made lazily in the middle of a step, two ranks can wait for each other
        in different ones. The barrier makes the axis' own, the messages those of rank pairs.
        """
        self.pp.barrier()
        rank_of = placement.rank_of
        pairs = {(rank_of[s], rank_of[s + 1]) for s in range(placement.num_stages - 1) if not placement.is_last(s)}
        for low, high in sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}):
            for src, dst in ((low, high), (high, low)):
                if self.pp.rank in (src, dst):
                    sends = self.pp.rank == src
                    one = torch.zeros(1, device=self.pp.device)
                    self.transport.post([Op(sends, dst if sends else src, one)])[0].wait()

    def exchange(self, messages: tuple[Message, ...], payload: Callable[[Pass], Tensor]) -> dict[Pass, InFlight]:
        """Post the messages; those of other ranks come back as receives, by the pass that made them.

        Args:
            messages: all with this rank as src or dst, in the global order of `schedule.lower`.
            payload: gives the tensor of a message that leaves here.
        """
        if self.variable_seq_lengths:
            return self._exchange_with_shapes(messages, payload)
        rank = self.pp.rank
        ops = [
            Op(True, dst, payload(made_by).contiguous(), _tag(made_by))
            if src == rank
            else Op(False, src, self._buffer(self.shape), _tag(made_by))
            for made_by, src, dst in messages
        ]
        return self._track(messages, ops)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self.sends:
            self._finish_oldest()

    # Megatron's nine methods. A neighbour that a first or last stage lacks makes that half of a call nothing.

    def recv_forward(self, tensor_shape: Shape, is_first_stage: bool) -> Tensor | None:
        """The output of the stage before, [s, b, h] with requires_grad; None on the first stage."""
        return self._communicate(recv_prev=None if is_first_stage else tensor_shape)[0]

    def recv_backward(self, tensor_shape: Shape, is_last_stage: bool) -> Tensor | None:
        """The gradient from the stage after, [s, b, h]; None on the last stage."""
        return self._communicate(recv_next=None if is_last_stage else tensor_shape)[1]

    def send_forward(self, output_tensor: Tensor | None, is_last_stage: bool) -> None:
        """An output to the stage after; nothing on the last stage."""
        self._communicate(send_next=None if is_last_stage else output_tensor)

    def send_backward(self, input_tensor_grad: Tensor | None, is_first_stage: bool) -> None:
        """A gradient to the stage before; nothing on the first stage."""
        self._communicate(send_prev=None if is_first_stage else input_tensor_grad)

    def send_forward_recv_backward(
        self, output_tensor: Tensor | None, tensor_shape: Shape, is_last_stage: bool
    ) -> Tensor | None:
        """Both with the stage after: an output goes, a gradient comes. None on the last stage."""
        if is_last_stage:
            return None
        return self._communicate(send_next=output_tensor, recv_next=tensor_shape)[1]

    def send_backward_recv_forward(
        self, input_tensor_grad: Tensor | None, tensor_shape: Shape, is_first_stage: bool
    ) -> Tensor | None:
        """Both with the stage before: a gradient goes, an output comes. None on the first stage."""
        if is_first_stage:
            return None
        return self._communicate(send_prev=input_tensor_grad, recv_prev=tensor_shape)[0]

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
        shapes = {name: x.shape if isinstance(x, Tensor) else x for name, x in present.items()}
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
        sync = self._synchronize if self._sync else None
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

    def _exchange_with_shapes(
        self, messages: tuple[Message, ...], payload: Callable[[Pass], Tensor]
    ) -> dict[Pass, InFlight]:
        """One message after the other, its shape right before it: the other rank may have grouped them differently."""
        received: dict[Pass, InFlight] = {}
        for message in messages:
            sends = message.src == self.pp.rank
            peer = message.dst if sends else message.src
            tensor = payload(message.made_by).contiguous() if sends else None
            shape = torch.tensor(self.shape if tensor is None else tensor.shape, device=self.pp.device)
            tag = _tag(message.made_by)
            (work,) = self.transport.post([Op(sends, peer, shape, tag)])
            if tensor is None:
                work.wait()
                tensor = self._buffer(shape.tolist())
            else:
                self.sends.append((message, InFlight(shape, work)))
            received |= self._track((message,), [Op(sends, peer, tensor, tag)])
        return received

    def _track(self, messages: Sequence[Message], ops: list[Op]) -> dict[Pass, InFlight]:
        received: dict[Pass, InFlight] = {}
        sync = self._synchronize if self._sync else None
        for message, op, work in zip(messages, ops, self.transport.post(ops), strict=True):
            if op.sends:
                self.sends.append((message, InFlight(op.tensor, work)))  # the tensor must live until it is sent
            else:
                received[message.made_by] = InFlight(op.tensor, work, sync)
        while len(self.sends) > self.sends_in_flight or (self.sends and self.sends[0][1].is_over):
            self._finish_oldest()
        return received

    def _finish_oldest(self) -> None:
        self.sends[0][1].wait()
        self.sends.popleft()

    def _buffer(self, shape: Shape) -> Tensor:
        return torch.empty(tuple(shape), dtype=self.dtype, device=self.pp.device)

    def _synchronize(self) -> None:
        synchronize(self.pp.device)


def _tag(made_by: Pass) -> int:
    """A number for each message of a step."""
    return made_by.microbatch << 13 | made_by.stage << 1 | (not made_by.kind.is_forward)
