"""Tables of drawn cases: with activations that leave the device or come a second time, weights that
are shares.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from megapipe.config.parallel.offload import Module
from megapipe.schedule import Schedule
from megapipe.schedule.families.offload.copies import with_offload, with_recompute
from megapipe.schedule.families.sharding.runs import GATHERS
from megapipe.schedule.families.sharding.sharded import UnshardedStages, with_sharded_weights

# Stages and microbatches, or slices, by what is left of their sum when it is divided by 3: on the
# host meanwhile, computed again.
MOVED: dict[str, tuple[set[int], set[int]]] = {
    "none": (set(), set()),
    "out": ({0, 1, 2}, set()),
    "again": (set(), {0, 1, 2}),
    "some": ({1}, {2}),
}
MODULES: list[tuple[Module, ...]] = [
    ("core_attn", "attn_proj"),
    ("attn_norm", "mlp_norm"),
    ("qkv_linear",),
    ("qkv_linear", "core_attn", "mlp_norm"),
    ("expert_fc1", "moe_act"),
    ("attn_norm", "core_attn", "attn_proj", "expert_fc1"),
]
"""Lists of --offload-modules, the last two for layers with experts."""
SHARDING: dict[str, dict[str, Any]] = {
    "none": {},
    "grads": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"},
    "weights": {"use_megatron_fsdp": True},
}


@lru_cache(maxsize=256)
def moved(schedule: Schedule, memory: str) -> Schedule:
    """The table with O, L and R as MOVED says."""
    out, again = MOVED[memory]
    forwards = (x for row in schedule.ranks for step in row for x in step if x.kind.is_forward)
    every = sorted({(x.stage, schedule.number(x)) for x in forwards})
    if again:
        schedule = with_recompute(schedule, chosen={x for x in every if sum(x) % 3 in again})
    return (
        with_offload(schedule, chosen={x for x in every if sum(x) % 3 in out}) if out else schedule
    )


@lru_cache(maxsize=256)
def sharded(schedule: Schedule, sharding: str, living: tuple[int, int, bool] | None) -> Schedule:
    """The table with RS and, where weights are shares too, AF and AB. Raises: ScheduleError if it
    cannot have them.
    """
    if sharding == "none":
        return schedule
    table = with_sharded_weights(schedule, living=UnshardedStages(*living) if living else ())
    if sharding == "weights":
        return table
    rows = tuple(tuple(step for step in row if step[0].kind not in GATHERS) for row in table.ranks)
    return replace(table, ranks=rows)
