"""The part of a microbatch that O, L and R of one of its slices move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megapipe.errors import ScheduleError

PerStage = float | tuple[float, ...]


class Moved(NamedTuple):
    """Fields of Costs that say what is moved of a microbatch, its keys and values in it, and what that takes."""

    o: PerStage
    l: PerStage
    mem_o: PerStage
    mem_r: PerStage
    mem_k: PerStage

    def of_slice(self, length: float, document: float) -> dict[str, Any]:
        """The fields but the last for a slice. A copy takes as much longer as there is more to copy.

        Args:
            length: of the slice, in sequences; document: of the document that ends with it, 0 if none does.
        Raises: ScheduleError if some are of each stage and others of all, and the keys of one count in the other.
        """
        if not any(self.mem_k) if isinstance(self.mem_k, tuple) else not self.mem_k:
            return {name: _times(length, whole) for name, whole in self._asdict().items() if name != "mem_k"}
        if not (counts := {len(x) for x in self if isinstance(x, tuple)}):
            rows: list[Any] = [self]
        else:
            if plain := [name for name, x in zip(self._fields, self, strict=True) if not isinstance(x, tuple) and x]:
                raise ScheduleError(f"Costs name {plain[0]} of all stages together, and others of each. Name each's.")
            rows = [*zip(*(x if isinstance(x, tuple) else (0.0,) * max(counts) for x in self), strict=True)]
        found = [*zip(*(_of_stage(row, length, document) for row in rows), strict=True)]
        return dict(zip(self._fields, found if counts else [x for (x,) in found], strict=False))


def _times(length: float, whole: PerStage) -> PerStage:
    return tuple(length * x for x in whole) if isinstance(whole, tuple) else length * whole


def _of_stage(whole: Sequence[float], length: float, document: float) -> tuple[float, ...]:
    out, back, copied, held, keys = whole
    moves = min(keys, copied)  # keys are copied first
    size = (copied - moves) * length + moves * document
    part = size / copied if copied else length
    return out * part, back * part, size, (held if document else held + keys) * length
