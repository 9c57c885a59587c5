"""Messages between pipeline ranks: posted as lists of operations in one of three modes, waited for when used.

Between two ranks messages have no names, only an order; every path here keeps that order the same at both ends.
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


class Messenger:
    """Sends and receives what one pipeline rank's program says.

    Args:
        pp: the pipeline axis.
        shape, dtype: of every message, hidden states [s, b, h] and their gradients.
        transport: how they are posted; plain by default.
        shape_of: the shape of a message that is none of these, by the pass that makes it.
        beyond_neighbours: messages go to other ranks too, over the axis' own group.
        variable_seq_lengths: the shape of each message is sent before it; `shape` then says only its dimensions.
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
        shape_of: Callable[[Pass], Shape | None] = lambda made_by: None,
        beyond_neighbours: bool = False,
        variable_seq_lengths: bool = False,
        sends_in_flight: int = 16,
    ) -> None:
        self.pp, self.shape, self.dtype, self.shape_of = pp, tuple(shape), dtype, shape_of
        self.transport = transport or Transport(pp)
        self.beyond_neighbours = beyond_neighbours
        self.variable_seq_lengths, self.sends_in_flight = variable_seq_lengths, sends_in_flight
        self.sends: deque[tuple[Message, InFlight]] = deque()

    @property
    def receives_ahead(self) -> Ahead:
        """The receives that may be posted before their turn; one of unknown size cannot be.

        With a shared vocabulary a GPU's ranks also wait for the group's messages. Receives ahead would save 0.1 to 1.2%
        of a step by NCCL's rules, where messages take 5% of a pass, and hold 2.1 multiprocessors, where it is 0.9; in
        one queue of the device (CUDA_DEVICE_MAX_CONNECTIONS=1) ranks stood in a circle behind them.
        """
        keeps_turns = self.variable_seq_lengths or (self.beyond_neighbours and self.pp.device.type == "cuda")
        return Ahead(0, frozenset()) if keeps_turns else self.transport.receives_ahead

    def open_links(self, placement: Placement) -> None:
        """Use every link of a placement once, in one order on all ranks.

        NCCL connects two ranks of a communicator at their first message; done in the middle of a step, two ranks can
        wait for each other in different ones.
        """
        self.pp.barrier()
        rank_of = placement.rank_of
        stages = range(placement.num_stages)
        linked = [(s, s + 1) for s in stages if placement.next(s) is not None]
        ends = [s for s in stages if placement.reads(s)]
        linked += [(s, end) for end in ends for s in placement.shares(end)]
        pairs = {(rank_of[a], rank_of[b]) for a, b in linked}
        # Sorted, so that ranks take the links in one order; each way once, as it has a communicator of its own.
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
            Op(True, dst, self._checked(made_by, payload(made_by)), _tag(made_by))
            if src == rank
            else Op(False, src, self._buffer(self.shape_of(made_by) or self.shape), _tag(made_by))
            for made_by, src, dst in messages
        ]
        return self._track(messages, ops)

    def _checked(self, made_by: Pass, x: Tensor) -> Tensor:
        """A tensor as it leaves; of another form it would end in the receiver's buffer, in gloo's or NCCL's words."""
        shape = tuple(self.shape_of(made_by) or self.shape)
        same = x.ndim == len(shape) if self.variable_seq_lengths else x.shape == shape
        if not (same and x.dtype == self.dtype):
            raise ConfigError(
                f"stage {made_by.stage} of the model gives {list(x.shape)} of {name_of(x.dtype)} in pass {made_by}, "
                f"and stages pass on [s, b, h] = {list(shape)} of {name_of(self.dtype)}, the type of "
                "config.pipeline_dtype or of all parameters. Let the forward of the stage return that."
            )
        # Transports send memory from end to end: strides do not travel.
        return x.contiguous()

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self.sends:
            self._finish_oldest()

    def _exchange_with_shapes(
        self, messages: tuple[Message, ...], payload: Callable[[Pass], Tensor]
    ) -> dict[Pass, InFlight]:
        """One message after the other, its shape right before it: the other rank may have grouped them differently."""
        received: dict[Pass, InFlight] = {}
        for message in messages:
            sends = message.src == self.pp.rank
            peer = message.dst if sends else message.src
            tensor = self._checked(message.made_by, payload(message.made_by)) if sends else None
            # In a message of its own before the tensor: a receive needs its buffer first, and only the sender knows
            # the size.
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
        for message, op, work in zip(messages, ops, self.transport.post(ops), strict=True):
            if op.sends:
                self.sends.append((message, InFlight(op.tensor, work)))  # the tensor must live until it is sent
            else:
                received[message.made_by] = InFlight(op.tensor, work)
        # Only the oldest is asked whether it is over: sends leave about in order, and each question costs a call.
        while len(self.sends) > self.sends_in_flight or (self.sends and self.sends[0][1].is_over):
            self._finish_oldest()
        return received

    def _finish_oldest(self) -> None:
        self.sends[0][1].wait()
        self.sends.popleft()

    def _buffer(self, shape: Shape) -> Tensor:
        return torch.empty(tuple(shape), dtype=self.dtype, device=self.pp.device)


def receive_ahead(program: Program, rank: int, ahead: Ahead) -> Program:
    """A program with each receive posted where the one `ahead` places before it stood, but none before V that stood
    behind it; the rest stays where it is.

    Safe where posting a receive blocks nothing: each link keeps its order, and no send waits longer.
    """
    if not ahead.places:
        return program
    # V may send the program back to its beginning: what other ranks send behind V must not be received before.
    cut = next((n for n, item in enumerate(program, 1) if _validates(item)), 0)
    return (*_ahead(program[:cut], rank, ahead), *_ahead(program[cut:], rank, ahead))


def _ahead(program: Program, rank: int, ahead: Ahead) -> Program:
    def early(m: Message) -> bool:
        return m.dst == rank and m.src in ahead.peers

    # One iterator feeds all exchanges: each takes as many receives as it had, from `ahead.places` further on.
    incoming = (m for item in program if isinstance(item, Exchange) for m in item.messages if early(m))
    items: list[tuple[Pass, ...] | Exchange] = [Exchange(tuple(islice(incoming, ahead.places)))]
    for item in program:
        if isinstance(item, Exchange):
            rest = tuple(m for m in item.messages if not early(m))
            item = Exchange((*rest, *islice(incoming, len(item.messages) - len(rest))))
        items.append(item)
    return tuple(item for item in items if not isinstance(item, Exchange) or item.messages)


def _validates(item: tuple[Pass, ...] | Exchange) -> bool:
    return not isinstance(item, Exchange) and Made.VALIDATED in item[0].kind.traits.makes


def _tag(made_by: Pass) -> int:
    """Return a number for a message: another for each of 32,768 microbatches in turn, or 512 of slices.

    More than an int32 holds would be no tag, and fewer are under way at a time.
    """
    number = made_by.microbatch if made_by.slice is None else made_by.microbatch << 6 | made_by.slice
    number &= 0x7FFF
    return number << 16 | made_by.stage << 4 | _MADE.index(made_by.kind.traits.makes[0])


_MADE = tuple(Made)
