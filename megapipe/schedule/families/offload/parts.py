"""The costs of O, L and R for one slice of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.families.family import times

_FIELDS = ("o", "l", "mem_o", "mem_r", "mem_k")


def of_slice(costs: Mapping[str, Any], length: float, document: float) -> Mapping[str, Any]:
    """Return the costs of copying and recomputing one slice: the fields o, l, mem_o and mem_r.

    o and l are the times of copying activations to the host and back, in proportion to their size.
    mem_o is the memory that is copied. mem_r is the memory that is held until a recomputation.

    Args:
        costs: {cost field: value for a whole microbatch}.
        length: length of the slice, as a fraction of the sequence.
        document: length of the document that ends with the slice, as a fraction of the sequence; 0
            if none does. The last slice of a document copies the keys and values of the whole
            document.
    Raises: ScheduleError if some fields have a value for each stage and others have one value for
        all. This is an error only where keys and values hold memory (mem_k).
    """
    moved = {name: costs[name] for name in _FIELDS}
    if moved["mem_o"] is None:
        moved["mem_o"] = costs["mem_b"]
    keys = moved["mem_k"]
    if not isinstance(keys, tuple):
        keys = (keys,)
    # Without keys a slice moves its share of everything, for each stage or for all.
    if not any(keys):
        return {name: times(length, moved[name]) for name in _FIELDS[:-1]}

    # With keys the fields of a stage depend on each other, so they are needed stage by stage.
    counts = {len(x) for x in moved.values() if isinstance(x, tuple)}
    if not counts:
        parts = _of_stage([*moved.values()], length, document)
        return dict(zip(_FIELDS, parts, strict=False))
    plain = [name for name, x in moved.items() if not isinstance(x, tuple) and x]
    if plain:
        raise ScheduleError(
            f"Costs name {plain[0]} of all stages together, and others of each. Name each's."
        )
    # One value for all stages is 0 here.
    columns = []
    for x in moved.values():
        columns.append(x if isinstance(x, tuple) else (0.0,) * max(counts))
    rows = [_of_stage(row, length, document) for row in zip(*columns, strict=True)]
    return dict(zip(_FIELDS, zip(*rows, strict=True), strict=False))


def _of_stage(whole: Sequence[float], length: float, document: float) -> tuple[float, ...]:
    """Return (o, l, mem_o, mem_r) of one slice of a microbatch on one stage.

    o and l are times of the copy to the host and back. mem_o is the memory that is copied, and
    mem_k the keys and values in it. mem_r is what stays if the forward is computed again.

    Args:
        whole: o, l, mem_o, mem_r and mem_k of a whole microbatch on the stage.
        length: length of the slice, as a fraction of the sequence.
        document: length of the document that ends with the slice, as a fraction of the sequence; 0
            if none does.
    """
    out, back, copied, held, keys = whole
    # Keys are copied first, all keys of a document with its last slice.
    moves = min(keys, copied)
    size = (copied - moves) * length + moves * document
    part = length
    if copied:
        part = size / copied
    # After a recomputed forward later slices still read the keys, unless the document ends here.
    stays = held
    if not document:
        stays += keys
    return out * part, back * part, size, stays * length
