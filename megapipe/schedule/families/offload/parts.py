"""The part of a microbatch that O, L and R of one of its slices move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.families.family import times

_FIELDS = ("o", "l", "mem_o", "mem_r", "mem_k")


def of_slice(costs: Mapping[str, Any], length: float, document: float) -> Mapping[str, Any]:
    """Return the fields of O, L and R for a slice. A copy takes as much longer as there is more to copy.

    Raises: ScheduleError if some are of each stage and others of all, and the keys of one count in the other.
    """
    moved = {name: costs[name] for name in _FIELDS}
    if moved["mem_o"] is None:
        moved["mem_o"] = costs["mem_b"]
    keys = moved["mem_k"]
    if not (any(keys) if isinstance(keys, tuple) else keys):
        return {name: times(length, moved[name]) for name in _FIELDS[:-1]}
    counts = {len(x) for x in moved.values() if isinstance(x, tuple)}
    if not counts:
        return dict(zip(_FIELDS, _of_stage([*moved.values()], length, document), strict=False))
    if plain := [name for name, x in moved.items() if not isinstance(x, tuple) and x]:
        raise ScheduleError(f"Costs name {plain[0]} of all stages together, and others of each. Name each's.")
    columns = (x if isinstance(x, tuple) else (0.0,) * max(counts) for x in moved.values())
    rows = zip(*columns, strict=True)
    found = zip(*(_of_stage(row, length, document) for row in rows), strict=True)
    return dict(zip(_FIELDS, found, strict=False))


def _of_stage(whole: Sequence[float], length: float, document: float) -> tuple[float, ...]:
    out, back, copied, held, keys = whole
    moves = min(keys, copied)  # keys are copied first
    size = (copied - moves) * length + moves * document
    part = size / copied if copied else length
    return out * part, back * part, size, (held if document else held + keys) * length
