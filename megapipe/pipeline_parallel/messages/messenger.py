"""Send and receive the messages of one pipeline rank's program.

An exchange is posted as a list of operations and waited for when its tensors are used. Messages
between two ranks are known by their order alone, so both ends keep the order of the program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.messages.agreed import name_of
from megapipe.pipeline_parallel.messages.transport import Ahead, InFlight, Op, Shape, Transport
from megapipe.schedule import Exchange, Message, Pass, Placement, Program
from megapipe.schedule.kinds import Made

_MADE = tuple(Made)


class Messenger:
    """The sender and receiver of the messages in one pipeline rank's program.

    `exchange` posts messages, `finish` waits for the last sends, and `open_links` connects ranks
    before the first step. `receives_ahead` says which receives may be posted early.

    Args:
        pp: the pipeline axis.
        shape, dtype: shape and type of hidden states [s, b, h] and their gradients. Most messages
            are of this kind.
        transport: posts the operations; by default one by one.
        shape_of: takes the pass that makes a message, and returns the message's shape; None for
            hidden states.
        beyond_neighbours: whether messages also go to ranks that are no neighbours in the pipeline.
        variable_seq_lengths: the shape of each message is sent before it. Only the number of
            dimensions of `shape` is used then.
        sends_in_flight: number of sends that may be under way before the oldest is waited for. This
            limits the memory of tensors that are being sent.
    """

    def __init__(
        self,
        pp: Axis,
        shape: Shape,
        dtype: torch.dtype,
        *,
        transport: Transport | None = None,
        shape_of: Callable[[Pass], Shape | None] = lambda made_by: None,
        beyond_neighbours: bool = False,
        variable_seq_lengths: bool = False,
        sends_in_flight: int = 16,
    ) -> None:
        self.pp = pp
        self.shape = tuple(shape)
        self.dtype = dtype
        self.shape_of = shape_of
        self.transport = transport or Transport(pp)
        self.beyond_neighbours = beyond_neighbours
        self.variable_seq_lengths = variable_seq_lengths
        self.sends_in_flight = sends_in_flight
        # Gloo does not say when a tensor has left, so with gloo this always holds the last
        # `sends_in_flight` tensors, even if they left long ago.
        self.sends: deque[tuple[Message, InFlight]] = deque()

    @property
    def receives_ahead(self) -> Ahead:
        """Return which receives may be posted before their place in the program."""
        # A receive of unknown size has no buffer yet.
        keeps_turns = self.variable_seq_lengths
        # With a shared vocabulary a GPU's ranks also wait for messages of the whole group. By
        # NCCL's rules receives ahead would save 0.1 to 1.2% of a step there, if messages take 5% of
        # a pass. They hold 2.1 multiprocessors instead of 0.9. With one queue of the device
        # (CUDA_DEVICE_MAX_CONNECTIONS=1) ranks waited for each other in a circle.
        keeps_turns |= self.beyond_neighbours and self.pp.device.type == "cuda"
        return Ahead(0, frozenset()) if keeps_turns else self.transport.receives_ahead

    def open_links(self, placement: Placement) -> None:
        """Send one message each way between all ranks that will exchange messages. Collective.

        NCCL connects two ranks of a communicator at their first message, and both must be there. In
        the middle of a step two ranks could each wait for the other in a different connection.

        placement: says which ranks exchange messages.
        """
        self.pp.barrier()
        rank_of = placement.rank_of
        stages = range(placement.num_stages)
        linked = [(s, s + 1) for s in stages if placement.next(s) is not None]
        ends = [s for s in stages if placement.reads(s)]
        linked += [(s, end) for end in ends for s in placement.shares(end)]
        pairs = {(rank_of[a], rank_of[b]) for a, b in linked}
        # Sorted, so that ranks take the links in one order. Both directions are used, as each may
        # have a communicator of its own.
        for low, high in sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}):
            for src, dst in ((low, high), (high, low)):
                if self.pp.rank in (src, dst):
                    sends = self.pp.rank == src
                    one = torch.zeros(1, device=self.pp.device)
                    peer = dst if sends else src
                    self.transport.post([Op(sends, peer, one)])[0].wait()

    def exchange(
        self, messages: tuple[Message, ...], payload: Callable[[Pass], Tensor]
    ) -> dict[Pass, InFlight]:
        """Post messages, and return {pass that made the tensor: the received tensor}.

        Args:
            messages: the messages, in the order that all ranks have in common. This rank sends or
                receives each.
            payload: takes a pass and returns its result, the tensor to send.
        """
        if self.variable_seq_lengths:
            return self._exchange_with_shapes(messages, payload)
        ops = []
        for made_by, src, dst in messages:
            tag = _tag(made_by)
            if src == self.pp.rank:
                tensor = self._checked(made_by, payload(made_by))
                ops.append(Op(True, dst, tensor, tag))
            else:
                buffer = self._buffer(self.shape_of(made_by) or self.shape)
                ops.append(Op(False, src, buffer, tag))
        return self._track(messages, ops)

    def _checked(self, made_by: Pass, x: Tensor) -> Tensor:
        """Return the result of a pass as a contiguous tensor that can be sent.

        Args:
            made_by: the pass.
            x: the result of the pass.
        Raises: ConfigError if it does not fit the receiver's buffer. Without this check gloo or
            NCCL would fail on the other rank.
        """
        shape = tuple(self.shape_of(made_by) or self.shape)
        fits = x.ndim == len(shape) if self.variable_seq_lengths else x.shape == shape
        if not (fits and x.dtype == self.dtype):
            raise ConfigError(
                f"stage {made_by.stage} of the model gives {list(x.shape)} of {name_of(x.dtype)} "
                f"in pass {made_by}, and stages pass on [s, b, h] = {list(shape)} of "
                f"{name_of(self.dtype)}, the type of config.pipeline_dtype or of all parameters. "
                "Let the forward of the stage return that."
            )
        # Transports send memory from end to end: strides do not travel.
        return x.contiguous()

    def finish(self) -> None:
        """Wait until all sends have completed."""
        while self.sends:
            self._finish_oldest()

    def _exchange_with_shapes(
        self, messages: tuple[Message, ...], payload: Callable[[Pass], Tensor]
    ) -> dict[Pass, InFlight]:
        """Post messages one by one, each right after its shape; arguments and result of `exchange`.

        Not all shapes come first, because the other rank may have grouped these messages
        differently.
        """
        received: dict[Pass, InFlight] = {}
        for message in messages:
            made_by, src, dst = message
            sends = src == self.pp.rank
            peer = dst if sends else src
            tensor = self._checked(made_by, payload(made_by)) if sends else None
            # The shape is a message of its own, because a receive needs its buffer first and only
            # the sender knows the size.
            if tensor is None:
                shape = torch.empty(len(self.shape), dtype=torch.int64, device=self.pp.device)
            else:
                # torch.tensor(..., device=) would let the host wait for the passes before it.
                shape = torch.tensor(tensor.shape).to(self.pp.device, non_blocking=True)
            tag = _tag(made_by)
            (work,) = self.transport.post([Op(sends, peer, shape, tag)])
            if tensor is None:
                work.wait()
                tensor = self._buffer(shape.tolist())
            else:
                self.sends.append((message, InFlight(shape, work)))
            received |= self._track((message,), [Op(sends, peer, tensor, tag)])
        return received

    def _track(self, messages: Sequence[Message], ops: list[Op]) -> dict[Pass, InFlight]:
        """Post operations, remember the sends, and return {pass: received tensor}.

        Args:
            messages: the messages.
            ops: the operation of each message.
        """
        received: dict[Pass, InFlight] = {}
        for message, op, work in zip(messages, ops, self.transport.post(ops), strict=True):
            in_flight = InFlight(op.tensor, work)
            if op.sends:
                self.sends.append((message, in_flight))  # the tensor must live until it is sent
            else:
                received[message.made_by] = in_flight
        # Only the oldest is asked whether it is over: sends leave about in order, and each question
        # costs a call.
        while len(self.sends) > self.sends_in_flight or (self.sends and self.sends[0][1].is_over):
            self._finish_oldest()
        return received

    def _finish_oldest(self) -> None:
        # It stays in the queue while it is waited for: a diagnosis of a hang reads the queue.
        self.sends[0][1].wait()
        self.sends.popleft()

    def _buffer(self, shape: Shape) -> Tensor:
        return torch.empty(tuple(shape), dtype=self.dtype, device=self.pp.device)


def receive_ahead(program: Program, rank: int, ahead: Ahead) -> Program:
    """Return the program with its receives posted `ahead.places` places earlier.

    The nth receive takes the place of the receive `ahead.places` before it. Nothing else moves.
    With one place, and receives of a, b and c:

        recv a  F0  recv b  F1  recv c  F2        before
        recv a  recv b  F0  recv c  F1  F2        after

    It is safe if posting a receive blocks nothing: each link keeps its order, and no send waits
    longer. Receives after V stay after it, as V may send the program back to its beginning.

    Args:
        rank: this pipeline rank.
        ahead: says which receives are posted earlier.
    """
    if not ahead.places:
        return program
    # V may send the program back to its beginning. Other ranks then send what follows V a second
    # time, so none of it may be received before V.
    cut = next((n for n, item in enumerate(program, 1) if _validates(item)), 0)
    return (*_ahead(program[:cut], rank, ahead), *_ahead(program[cut:], rank, ahead))


def _ahead(program: Program, rank: int, ahead: Ahead) -> Program:
    """Return a program with its receives posted earlier.

    `program` is part of a rank's program. The part must have no V, the pass that validates an
    update.

    Args:
        ahead: says which receives are posted earlier.
    """

    def early(m: Message) -> bool:
        return m.dst == rank and m.src in ahead.peers

    # One iterator feeds all exchanges: each takes as many receives as it had, from `ahead.places`
    # further on.
    incoming = (
        m for item in program if isinstance(item, Exchange) for m in item.messages if early(m)
    )
    items: list[tuple[Pass, ...] | Exchange] = [Exchange(tuple(islice(incoming, ahead.places)))]
    for item in program:
        if isinstance(item, Exchange):
            rest = tuple(m for m in item.messages if not early(m))
            receives = islice(incoming, len(item.messages) - len(rest))
            item = Exchange((*rest, *receives))
        items.append(item)
    return tuple(item for item in items if not isinstance(item, Exchange) or item.messages)


def _validates(item: tuple[Pass, ...] | Exchange) -> bool:
    return not isinstance(item, Exchange) and Made.VALIDATED in item[0].kind.traits.makes


def _tag(made_by: Pass) -> int:
    """Return a number for a message that no other message under way has.

    The number repeats after 32,768 microbatches, or after 512 if they are cut into slices. Fewer
    microbatches than that are under way at a time.
    """
    number = made_by.microbatch
    if made_by.slice is not None:
        number = number << 6 | made_by.slice
    # An int32: 15 bits for the microbatch, 12 for the stage and 4 for the thing that is sent, which
    # is one of the first 16 in `Made`. Gloo takes no larger tag.
    made = _MADE.index(made_by.kind.traits.makes[0])
    return (number & 0x7FFF) << 16 | made_by.stage << 4 | made
