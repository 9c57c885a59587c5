"""Copy a rank's state to its own shared memory and to its clique's, while the step goes on.

Two generations are kept, in two slots that are written in turn. A generation counts once all ranks
hold it. No message says so: the gradient norm of a step needs all ranks, and each of them has ended
its copy by then. So whoever begins the next copy knows that the last one is whole, and overwrites
the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.memory import slots
from megapipe.checkpoint.memory.cliques import Clique
from megapipe.checkpoint.memory.slots import Slot
from megapipe.errors import CheckpointError

State = Sequence[Sequence[Tensor]]
"""The tensors of a rank's state, stage by stage."""
_ALIGN = 64


class Copies:
    """The states that a rank keeps in shared memory: its own, and the states of its clique.

    `begin` copies one stage. After the rank's last stage it sends the whole state to the clique.
    `now` copies all stages at once. `listed` and `sound` say which states are in memory. `give` and
    `take` send a state to a rank that lost it. `load` copies this rank's state back into the run.
    `close` removes all states.

    `forget` drops all states. `reached` is the step that this rank has trained to.

    Args:
        folder: this rank's folder in shared memory.
        clique: who keeps this rank's state.
        sizes: bytes of the state of each rank of the clique, in its order.
        state: this rank's tensors.
        every: steps from one copy to the next.

    Attributes:
        rank: the rank of this process in the world.
        content: returns the rest of the state now, as a checkpoint's state.json has it.
        done: the generation that was copied last: the number of steps before it. None before.
    """

    def __init__(
        self,
        folder: Path,
        clique: Clique,
        sizes: Sequence[int],
        state: State,
        every: int,
    ) -> None:
        self.clique = clique
        self.rank = clique.axis.ranks[clique.axis.rank]
        self._folder = folder
        self._state = state
        self.content: Callable[[], Mapping[str, Any]] = dict
        self._every = every
        # Of another layout, a state of the same size must not be loaded.
        shapes = [[(str(x.dtype), x.numel()) for x in stage] for stage in state]
        self._layout = sha256(repr(shapes).encode()).hexdigest()[:16]
        self._slots: dict[int, list[Slot]] = {}
        for rank, size in zip(clique.axis.ranks, sizes, strict=True):
            if rank == self.rank or clique.sends:
                paths = [folder / f"{rank}.{n}" for n in range(2)]
                self._slots[rank] = [Slot(path, size) for path in paths]
        self.done: int | None = None
        self._slot = 1
        self._header: dict[str, Any] | None = None
        self._left = 0

    def begin(self, stage: int, *, always: bool = False) -> Callable[[], None]:
        """Begin to copy a stage, and return a function that waits for the end.

        The state may change once `begin` has returned.

        Args:
            stage: its place among this rank's stages.
            always: copy even after a step that `every` leaves out.
        """
        if self._header is None:
            content = self.content()
            n = content["iteration"]
            self._slots[self.rank][0].reached = n
            # The first step copies in any case, as nothing is in memory before.
            due = always or self.done is None or n % self._every == 0
            if n == self.done or not due:
                return lambda: None
            self._slot = 1 - self._slot
            self._header = {"generation": n, "layout": self._layout, "content": content}
            self._left = len(self._state)
            self._slots[self.rank][self._slot].drop()
        for part, tensor in self._places(stage):
            part.copy_(tensor.reshape(-1).view(torch.uint8))
        self._left -= 1
        if self._left:
            return lambda: None
        header = self._header
        self._header = None
        self.done = header["generation"]
        ended: Future[None] = Future()
        # A daemon: a run that ends by an error does not wait for its messages.
        threading.Thread(target=self._send, args=(header, ended), daemon=True).start()
        return ended.result

    def now(self) -> None:
        """Copy the whole state now and wait, unless this generation is copied already."""
        waits = [self.begin(stage, always=True) for stage in range(len(self._state))]
        for wait in waits:
            wait()

    def _send(self, header: dict[str, Any], ended: Future[None]) -> None:
        """Send the copied state to the clique, and mark complete states as valid on both sides.

        Args:
            header: the header of the slot, without the checksum.
            ended: gets the end, or the error.
        """
        try:
            own = self._slots[self.rank][self._slot]
            header["checksum"] = own.checksum()
            if self.clique.sends:
                self._exchange(header, own)
            # After the others have it: a rank with a sealed slot has it twice.
            own.seal(header)
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    def _exchange(self, header: dict[str, Any], own: Slot) -> None:
        """Send the state to the others of the clique, receive theirs, and mark them as valid.

        Args:
            header: the header of this rank's slot, with the checksum of its state.
            own: the slot with this rank's state.
        Raises: CheckpointError if a state has changed on its way.
        """
        axis = self.clique.axis
        others = [i for i in range(axis.size) if i != axis.rank]
        mine = torch.tensor([header["checksum"]])
        theirs = {i: self._slots[axis.ranks[i]][self._slot] for i in others}
        for slot in theirs.values():
            slot.drop()
        group = axis.group
        assert group is not None
        works = [group.send([own.data], i, 0) for i in others]
        works += [group.recv([slot.data], i, 0) for i, slot in theirs.items()]
        expected = {i: torch.zeros_like(mine) for i in others}
        works += [group.send([mine], i, 1) for i in others]
        works += [group.recv([x], i, 1) for i, x in expected.items()]
        for work in works:
            work.wait()
        # Both ends compare: the source with what each replica has, and the replica with the source.
        found = {i: torch.tensor([slot.checksum()]) for i, slot in theirs.items()}
        returned = {i: torch.zeros_like(mine) for i in others}
        works = [group.send([x], i, 2) for i, x in found.items()]
        works += [group.recv([x], i, 2) for i, x in returned.items()]
        for work in works:
            work.wait()
        for i, slot in theirs.items():
            rank = axis.ranks[i]
            if found[i] != expected[i]:
                raise CheckpointError(f"rank {rank}'s state has changed on its way to {self.rank}")
            if returned[i] != mine:
                raise CheckpointError(f"rank {self.rank}'s state has changed on its way to {rank}")
            # Layouts differ between stages, so a replica has none; its content is everyone's.
            slot.seal(header | {"layout": None, "checksum": int(found[i])})

    # The states that are found in memory when ranks have started again.

    def listed(self) -> list[tuple[int, int, int]]:
        """Return (rank, generation, slot) of each state in memory here, by its readable header.

        The generation is the number of steps before the state. The slot is 0 or 1, one of two
        copies.
        """
        found = []
        for rank, pair in self._slots.items():
            for n, slot in enumerate(pair):
                header = slot.header()
                fits = header is not None and header["layout"] in (None, self._layout)
                if header is not None and fits:
                    found.append((rank, header["generation"], n))
        return found

    @property
    def reached(self) -> int:
        """The step that this rank had reached; 0 if its memory was lost."""
        return self._slots[self.rank][0].reached

    def sound(self, rank: int, generation: int, slot: int) -> bool:
        """Return whether a rank's state is in memory here, undamaged by its checksum.

        Args:
            rank: the rank of the world.
            generation: the number of steps before the state.
            slot: 0 or 1, the rank's copy to look at.
        """
        return self._slots[rank][slot].sound(generation)

    def give(self, rank: int, slot: int, to: int) -> None:
        """Send a rank's state to another rank of the clique, which receives it by `take`.

        Args:
            rank: the rank whose state it is.
            slot: 0 or 1, the copy that is sent.
            to: the rank that receives.
        """
        source = self._slots[rank][slot]
        self._message("send", source.data, to)
        self._message("send", source.head, to)

    def take(self, rank: int, slot: int, generation: int, source: int) -> None:
        """Receive a rank's state, which another rank sends by `give`.

        Args:
            rank: the rank whose state it is.
            slot: 0 or 1, the copy that is written here.
            generation: the number of steps before the state.
            source: the rank of the clique that sends.
        Raises: CheckpointError if the state has changed on its way.
        """
        target = self._slots[rank][slot]
        target.drop()
        self._message("recv", target.data, source)
        # The header comes last: a rank that is killed before has an invalid slot.
        head = torch.empty_like(target.head)
        self._message("recv", head, source)
        target.head.copy_(head)
        if not target.sound(generation):
            target.drop()
            raise CheckpointError(f"rank {rank}'s state has changed on its way from {source}")

    def _message(self, way: str, x: Tensor, other: int) -> None:
        axis = self.clique.axis
        getattr(axis.group, way)([x], axis.ranks.index(other), 3).wait()

    def load(self, generation: int, slot: int) -> dict[str, Any]:
        """Copy this rank's tensors from memory back into the run, and return its other state.

        States of other steps are dropped. They may be newer, of a run that does not go on.

        Args:
            generation: the number of steps before the state.
            slot: 0 or 1, the copy that has this state.
        """
        for pair in self._slots.values():
            for one in pair:
                header = one.header()
                if header is not None and header["generation"] != generation:
                    one.drop()
        self._slot = slot
        self.done = generation
        for stage in range(len(self._state)):
            for part, tensor in self._places(stage):
                tensor.reshape(-1).view(torch.uint8).copy_(part)
        header = self._slots[self.rank][slot].header()
        assert header is not None
        content: dict[str, Any] = header["content"]
        return content

    def forget(self) -> None:
        """Drop all states, of a run that does not go on from them."""
        for pair in self._slots.values():
            for one in pair:
                one.drop()

    def close(self) -> None:
        """Remove all states, at the end of the run."""
        slots.remove(self._folder)

    def _places(self, stage: int) -> list[tuple[Tensor, Tensor]]:
        """Return (bytes in the present slot, tensor) of each tensor of a stage."""
        data = self._slots[self.rank][self._slot].data
        at = sum(size_of([tensors]) for tensors in self._state[:stage])
        found = []
        for tensor in self._state[stage]:
            size = tensor.numel() * tensor.element_size()
            found.append((data[at : at + size], tensor))
            at += -(-size // _ALIGN) * _ALIGN
        return found


def size_of(state: State) -> int:
    """Return the bytes of a state in a slot: each tensor's, up to a multiple of 64."""
    sizes = [x.numel() * x.element_size() for stage in state for x in stage]
    return sum(-(-size // _ALIGN) * _ALIGN for size in sizes)
