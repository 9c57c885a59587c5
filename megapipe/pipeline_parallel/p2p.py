"""Messages between pipeline ranks. Posts what an exchange lists, in its order, and hands back receives to wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.mesh import Axis
from megapipe.schedule import Message, Pass


@dataclass(frozen=True)
class Received:
    """A tensor that may still be on its way."""

    tensor: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """The tensor, once it is here."""
        self.work.wait()
        return self.tensor


class P2PCommunicator:
    """Sends and receives of one pipeline rank, in batched mode: the messages of an exchange are posted together.

    Args:
        pp: the pipeline axis.
        shape, dtype: of every message, hidden states [s, b, h] and their gradients.
        sends_in_flight: how many sends may be under way before the oldest is waited for.
    """

    def __init__(self, pp: Axis, shape: tuple[int, ...], dtype: torch.dtype, *, sends_in_flight: int = 16) -> None:
        self.pp, self.shape, self.dtype = pp, shape, dtype
        self.sends_in_flight = sends_in_flight
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def exchange(self, messages: tuple[Message, ...], payload: Callable[[Pass], Tensor]) -> dict[Pass, Received]:
        """Post the messages; those of other ranks come back as receives, by the pass that made them.

        Args:
            messages: all with this rank as src or dst, in the global order of `schedule.lower`.
            payload: gives the tensor of a message that leaves here.
        """
        tensors = [payload(m.made_by).contiguous() if self._leaves(m) else self._buffer() for m in messages]
        works = self._post(messages, tensors)
        received: dict[Pass, Received] = {}
        for message, tensor, work in zip(messages, tensors, works, strict=True):
            if self._leaves(message):
                self._sends.append((work, tensor))  # the tensor must live until it is sent
            else:
                received[message.made_by] = Received(tensor, work)
        while len(self._sends) > self.sends_in_flight:
            self._sends.popleft()[0].wait()
        return received

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def _leaves(self, message: Message) -> bool:
        return message.src == self.pp.rank

    def _buffer(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.pp.device)

    def _post(self, messages: tuple[Message, ...], tensors: list[Tensor]) -> list[dist.Work]:
        group = self.pp.group
        peers = [m.dst if self._leaves(m) else m.src for m in messages]
        calls = [dist.isend if self._leaves(m) else dist.irecv for m in messages]
        if self.pp.device.type == "cuda":
            # One NCCL group call on the axis' own communicator. Posted one by one, messages to two peers would use
            # two-rank communicators made lazily in the middle of a step.
            zipped = zip(calls, tensors, peers, strict=True)
            works = dist.batch_isend_irecv([dist.P2POp(op, t, group=group, group_peer=r) for op, t, r in zipped])
            return works if len(works) == len(messages) else works * len(messages)
        posted = []
        for message, tensor, peer in zip(messages, tensors, peers, strict=True):
            if self._leaves(message):
                work = dist.isend(tensor, group=group, group_dst=peer)
            else:
                work = dist.irecv(tensor, group=group, group_src=peer)
            assert work is not None
            posted.append(work)
        return posted
