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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.checkpoint.memory import slots
from megapipe.checkpoint.memory.cliques import Clique
from megapipe.checkpoint.memory.relayout import State, rows, size_of
from megapipe.checkpoint.memory.slots import HEADER, Slot
from megapipe.errors import CheckpointError


class Name(NamedTuple):
    """The name of a training state in memory.

    Attributes:
        world: the number of ranks of the run when the state was copied.
        owner: the global rank to which the state belongs.
    """

    world: int
    owner: int


class Copies:
    """The training states that a rank keeps in shared memory: its own, and its clique's.

    A clique is a few ranks that keep each other's states. All ranks copy after the same steps; the
    number of such a step is a generation. Each state has two slots, which are written in turn.

    `begin` copies one stage. After the rank's last stage it sends the whole state to the clique.
    `now` copies all stages at once. `listed` says which states are in memory, also states from a
    run with more or fewer ranks. `slot` returns the memory of one state. `load` copies this rank's
    state back into the run. `forget` makes all states invalid, and `close` removes them.

    `reached` is the last step that this rank has trained.

    Args:
        folder: this rank's folder in shared memory.
        clique: the ranks that keep this rank's state.
        sizes: bytes of the state of each rank, in the order of the clique's ranks.
        state: this rank's tensors.
        every: copies are made after the first step, and after each whose number is a multiple of
            `every`.
        world: number of ranks.
        layout: a text that is equal for runs which may take each other's states.

    Attributes:
        rank: the global rank of this process.
        name: the name of this rank's own state.
        sizes: {name of a state that this rank keeps: its bytes}.
        content: a function that returns the rest of the state, as in a checkpoint's state.json.
        done: the step after which the last copy was made; None before the first copy.
    """

    def __init__(
        self,
        folder: Path,
        clique: Clique,
        sizes: Sequence[int],
        state: State,
        every: int,
        world: int,
        layout: str = "",
    ) -> None:
        self.clique = clique
        self.rank = clique.axis.ranks[clique.axis.rank]
        self.name = Name(world, clique.owner)
        self._folder = folder
        self._state = state
        self.content: Callable[[], Mapping[str, Any]] = dict
        self._every = every
        self._layout = layout
        if clique.sends:
            names = [Name(world, rank) for rank in clique.axis.ranks]
            self.sizes = dict(zip(names, sizes, strict=True))
        else:
            self.sizes = {self.name: sizes[clique.axis.rank]}
        self._slots: dict[Name, list[Slot]] = {}
        for path in sorted(folder.glob("*-*.0")):
            found = Name(*map(int, path.stem.split("-")))
            # What an earlier process kept: of another rank, or when there were fewer or more.
            if found not in self.sizes:
                self._open(found, path.stat().st_size - HEADER)
        for name, size in self.sizes.items():
            self._open(name, size)
        self.done: int | None = None
        self._slot = 1
        self._header: dict[str, Any] | None = None
        self._left = 0

    def _open(self, name: Name, size: int) -> None:
        self._slots[name] = [Slot(self._path(name, n), size) for n in range(2)]

    def begin(self, stage: int, *, always: bool = False) -> Callable[[], None]:
        """Begin to copy a stage, and return a function that waits for the end.

        The state may change once `begin` has returned. The function of the last stage waits until
        the whole clique has the copy. It returns at once for other stages and for steps without a
        copy.

        Args:
            stage: the index of the stage among this rank's stages.
            always: copy also after a step that is no multiple of `every`.
        """
        if self._header is None:
            content = self.content()
            n = content["iteration"]
            self._slots[self.name][0].reached = n
            # The first step copies in any case, as nothing is in memory before.
            due = always or self.done is None or n % self._every == 0
            if n == self.done or not due:
                return lambda: None
            self._slot = 1 - self._slot
            self._header = {"generation": n, "layout": self._layout, "content": content}
            self._left = len(self._state)
            self._slots[self.name][self._slot].drop()
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
        """Copy the whole state now and wait, unless the state after this step is copied already."""
        waits = [self.begin(stage, always=True) for stage in range(len(self._state))]
        for wait in waits:
            wait()

    def _send(self, header: dict[str, Any], ended: Future[None]) -> None:
        """Send the copied state to the clique, and mark complete states as valid on both sides.

        Args:
            header: the header of the slot in which this rank's state is, without the checksum.
            ended: a future to complete when the copies are complete, or to fail with the error.
        """
        try:
            own = self._slots[self.name][self._slot]
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
        names = {i: Name(self.name.world, axis.ranks[i]) for i in others}
        theirs = {i: self._slots[names[i]][self._slot] for i in others}
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
            # The rest of the header is everyone's.
            slot.seal(header | {"checksum": int(found[i])})

    # The states that are found in memory when ranks have started again.

    def listed(self) -> list[tuple[Name, int, int]]:
        """Return (name, step, slot) of each state in memory here, such as (Name(8, 3), 40, 1).

        The step is the one after which the state was copied, and the slot is 0 or 1. Only headers
        are read; the bytes of the state may be damaged.
        """
        found = []
        for name, pair in self._slots.items():
            for n, slot in enumerate(pair):
                header = slot.header()
                if header is not None and header["layout"] == self._layout:
                    found.append((name, header["generation"], n))
        return found

    def slot(self, name: Name, number: int) -> Slot:
        """Return the memory of a state in its slot `number`, 0 or 1."""
        return self._slots[name][number]

    @property
    def reached(self) -> int:
        """The last step that this rank has trained, also before a restart; 0 if memory was lost."""
        return max(pair[0].reached for pair in self._slots.values())

    def load(self, generation: int, slot: int) -> dict[str, Any]:
        """Copy this rank's tensors from memory back into the run, and return the rest of the state.

        States of other steps are made invalid, also newer ones: the run goes on from here, and
        trains those steps again. States that this rank need not keep any more are removed.

        Args:
            generation: the step after which the state was copied.
            slot: 0 or 1, the slot that has this state.
        Returns: the state without tensors, as in a checkpoint's state.json.
        """
        self._slots[self.name][0].reached = generation
        self._remove_others()
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
        header = self._slots[self.name][slot].header()
        assert header is not None
        content: dict[str, Any] = header["content"]
        return content

    def forget(self) -> None:
        """Make all states in memory invalid, as the run starts from a checkpoint instead."""
        self._remove_others()
        for pair in self._slots.values():
            for one in pair:
                one.drop()

    def _remove_others(self) -> None:
        for name in [name for name in self._slots if name not in self.sizes]:
            del self._slots[name]
            for n in range(2):
                self._path(name, n).unlink(missing_ok=True)

    def _path(self, name: Name, number: int) -> Path:
        return self._folder / f"{name.world}-{name.owner}.{number}"

    def close(self) -> None:
        """Remove all states, at the end of the run."""
        slots.remove(self._folder)

    def _places(self, stage: int) -> list[tuple[Tensor, Tensor]]:
        """Return (bytes in shared memory, tensor) for each tensor of one of this rank's stages.

        The bytes are a view of the copy that `begin` writes, or that `load` reads.
        """
        data = self._slots[self.name][self._slot].data
        at = size_of(self._state[:stage])
        found = []
        for x in self._state[stage]:
            found.append((data[at : at + x.size], x.tensor))
            at += rows(x.size)
        return found
