"""Costs of a file for a comparison: over another number of stages, and in units to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megapipe.schedule.costs import ATTENTION, SHARES, UNIT, Costs

_WHOLE = ("mem_p", "mem_r")
"""Memory that each part of a stage needs whole: what a pass needs while it runs, and its input."""
_KEPT = ("s", "t", "e", "mem_s", "mem_lent")
"""Costs of a rank's share or of one stage alone, which cannot be divided among other stages."""
_TIMES = ("f", "b", "w")
_GIGA = 2.0**30
_TERA = 1e12
_LARGE = 1e9
"""Times of more than this are no seconds, but FLOPs of `megapipe plan --save-costs`."""
OWN_COSTS = "megapipe plan <flags> --pipeline-schedule NAME --save-costs FILE"
"""The command that writes the costs of a schedule's own stages."""
_BYTES = 2.0**20
"""Memory of more than this is in bytes, as in all files of `--save-costs`."""


def over_stages(costs: Costs, stages: int) -> Costs:
    """Return costs that name each stage, for a model that is cut in another number of stages.

    A stage is divided in equal parts, or neighbours are merged. The time of a head, if the costs
    have it, stays on the last part. The sums over the model stay the same, but for memory that each
    part needs whole. Costs are returned unchanged if one number of
    stages does not divide the other, or if some of the costs cannot be divided (see _KEPT).

    Args:
        stages: the number of stages of one copy of the model.
    """
    # Every tuple has a value for each stage, except comm, which has one for each link.
    named = {name: value for name, value in vars(costs).items() if isinstance(value, tuple)}
    named.pop("comm", None)
    lengths = {len(value) for value in named.values()}
    if len(lengths) != 1 or any(name in named for name in _KEPT):
        return costs
    (given,) = lengths
    values: dict[str, Any] = {}
    if given < stages and stages % given == 0:
        parts = stages // given
        for name, value in named.items():
            share = parts
            if name in _WHOLE or name in ATTENTION:
                share = 1
            head = 0.0
            if name in _TIMES:
                head = getattr(costs, f"head_{name}") or 0.0
            of_layers = (*value[:-1], value[-1] - head)
            divided = [x / share for x in of_layers for _ in range(parts)]
            values[name] = (*divided[:-1], divided[-1] + head)
    elif given > stages and given % stages == 0 and not any(name in named for name in ATTENTION):
        parts = given // stages
        for name, value in named.items():
            groups = [value[n : n + parts] for n in range(0, given, parts)]
            if name == "mem_p":
                values[name] = tuple(map(max, groups))
            elif name == "mem_r":
                # A merged stage keeps the input of its first part.
                values[name] = tuple(group[0] for group in groups)
            else:
                values[name] = tuple(map(sum, groups))
    return replace(costs, **values)


def in_units(
    costs: Sequence[Costs], memory: float | None
) -> tuple[Sequence[Costs], float | None, str]:
    """Return costs with smaller numbers, and a line that says the units.

    `megapipe plan --save-costs` writes FLOPs and bytes, and with --rates seconds and bytes, as
    a rehearsal does. Other costs are returned unchanged. So are several costs: each might have
    units of its own, and a limit is in the same unit for all.

    Args:
        memory: a limit in the unit of the costs; None for none.
    Returns: (the costs, the limit in their new unit, the line).
    """
    (first, *others) = costs
    if (
        others
        or not isinstance(first.f, tuple)
        or not isinstance(first.mem_b, tuple)
        or max(first.mem_b) < _BYTES
    ):
        if any(one.mem_b != UNIT.mem_b for one in costs):
            return costs, memory, "times and peak in the units of --costs"
        peak = "peak in activations of a microbatch in 1/p of the model"
        return costs, memory, f"times in the unit of --costs; {peak}"
    unit = 1.0
    times = "seconds, if megapipe rehearse or megapipe plan --rates wrote the file"
    if max(first.f) > _LARGE:
        unit = _TERA
        times = (
            "TFLOPs: divided by the TFLOP/s of your device they are seconds, without the messages "
            "that the seconds of megapipe plan have"
        )
    values: dict[str, Any] = {}
    for name, value in vars(first).items():
        if value is None or name in (*SHARES, *ATTENTION, "wide_k"):
            continue
        by = unit
        if name.startswith("mem_"):
            by = _GIGA
        if isinstance(value, tuple):
            values[name] = tuple(x / by for x in value)
        else:
            values[name] = value / by
    if memory is not None:
        memory /= _GIGA
    return [replace(first, **values)], memory, f"times in {times}; peak in GiB of activations"


def said_of(costs: Costs, stages: set[int]) -> list[str]:
    """Return lines on the schedules of a comparison that have other stages than the costs name.

    Args:
        stages: the numbers of stages over which `over_stages` divided the costs.
    """
    if not stages or not isinstance(costs.f, tuple):
        return []
    counts = ", ".join(map(str, sorted(stages)))
    spread = "a head or embedding"
    if costs.head_f is not None:
        spread = "an embedding and the memory of a head"
    return [
        f"the costs name {len(costs.f)} stages. For schedules of {counts} stages each is divided "
        f"equally, or neighbours are merged: the sums are the same, but {spread} is "
        "spread over all parts of its stage. For the costs of such a schedule's own stages: "
        f"{OWN_COSTS}"
    ]
