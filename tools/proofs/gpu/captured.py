"""CUDA graphs on a CPU: the operations of a function are noted with the tensors that they read and
write, and run again on the same memory, whatever Python has become meanwhile.

What a GPU refuses is refused where it can be seen: results whose size or value the host must know,
numbers from the host, random ones. What a graph leaves undefined is NaN: all that it makes, until
it is replayed. A capture itself changes nothing. Not seen: memory that a graph shares with its
neighbours in the pool, streams, and loops that are no operations of torch (kernels/cpu.c, which
float64 does not take).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket, _OpNamespace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_REFUSED = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_FROM_HOST = {"lift_fresh", "lift_fresh_copy", "_local_scalar_dense"}


@cache
def look_up_in_turn() -> None:
    """Let one thread at a time look up an operation of torch that has no object of Python yet.

    torch makes the object at the first look-up, and its C++ keeps a borrowed pointer to it. Of two
    threads that ask at once each makes one. The second object replaces the first, which is freed
    while the pointer stays. Ranks that capture as threads then called a cell or an event in place
    of an operation, or the process ended.
    """
    turns = threading.RLock()

    def one_by_one(look_up: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def found(owner: Any, name: str) -> Any:
            with turns:
                # Another thread may have made it meanwhile.
                made = owner.__dict__
                return made[name] if name in made else look_up(owner, name)

        return found

    for kind in (OpOverloadPacket, _OpNamespace):
        kind.__getattr__ = one_by_one(kind.__getattr__)  # type: ignore[method-assign]


class Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations.

    Attributes:
        jobs: each with its arguments, the tensors that it has made, and where among its results
            they are.
        made: by their memory.
        before: what memory that was there has had before the first of them wrote to it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        look_up_in_turn()
        self.jobs = list[tuple[Callable[..., Any], Any, dict[str, Any], dict[int, Tensor]]]()
        self.made = dict[int, Tensor]()
        self.before = dict[int, tuple[Tensor, Tensor]]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if _is_refused(func, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        places = func._schema.arguments
        given = dict(zip((place.name for place in places), args, strict=False)) | kwargs
        written = _tensors([given.get(place.name) for place in places if place.is_write])
        there = set(map(_memory, _tensors((args, kwargs))))
        for x in written:
            if _memory(x) not in self.made.keys() | self.before.keys():
                flat = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
                self.before[_memory(x)] = flat, flat.clone()
        out = func(*args, **kwargs)
        fresh = {i: x for i, x in enumerate(_tensors(out)) if _memory(x) not in there}
        self.made.update((_memory(x), x) for x in fresh.values())
        if fresh or written:
            self.jobs.append((func, args, kwargs, fresh))
        return out

    def undo(self) -> None:
        """A capture computes nothing."""
        for flat, before in self.before.values():
            flat.copy_(before)

    def replay(self) -> None:
        """Run them again, on the same memory."""
        with torch.no_grad():
            for func, args, kwargs, fresh in self.jobs:
                made = _tensors(func(*args, **kwargs))
                for place, x in fresh.items():
                    x.copy_(made[place])


class Pool:
    """A pool of a slot's graphs. on_replay: called with the number of the graph in it, from 0."""

    def __init__(self, on_replay: Callable[[int], None] = lambda number: None) -> None:
        self._on_replay = on_replay
        self._graphs = list[tuple[Noting, set[int]]]()

    def __call__(
        self, function: Callable[[], Sequence[Tensor]]
    ) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """Run a function, and return its results and a function that replays it, as
        device.graph_pool's pools do.
        """
        with Noting() as noted:
            results = function()
        noted.undo()
        self._graphs.append((noted, set(map(_memory, results))))
        self._poison()
        return results, partial(self._replay, len(self._graphs) - 1)

    def _replay(self, number: int) -> None:
        self._on_replay(number)
        if number == 0:
            self._poison()
        self._graphs[number][0].replay()
        if number == len(self._graphs) - 1:  # the slot is free, but for what this one leaves
            self._poison(self._graphs[number][1])

    def _poison(self, but: Collection[int] = ()) -> None:
        for noted, _ in self._graphs:
            for memory, x in noted.made.items():
                if memory not in but:
                    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
                    whole.fill_(float("nan") if x.is_floating_point() else 1)


def _is_refused(func: Any, args: Any) -> bool:
    name = func.overloadpacket.__name__
    if name == "index":  # by a mask it would be of unknown size
        return any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1]))
    return bool(_REFUSED & set(func.tags)) or name in _FROM_HOST or func.namespace == "c10d"


def _tensors(values: object) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
