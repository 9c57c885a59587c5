"""The list of all families of passes. A new one is a folder here and a line in both lists."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.families.offload import OFFLOAD as OFFLOAD
from megapipe.schedule.families.offload import OffloadCosts
from megapipe.schedule.families.replicas import REPLICAS, ReplicaCosts
from megapipe.schedule.families.sharding import SHARDING as SHARDING
from megapipe.schedule.families.sharding import ShardingCosts
from megapipe.schedule.families.step import STEP, StepCosts
from megapipe.schedule.families.vocabulary import VOCABULARY, VocabularyCosts

FAMILIES = STEP, OFFLOAD, SHARDING, VOCABULARY, REPLICAS


# The last base's fields come first in a dataclass, so the bases are in reverse order.
@dataclass(frozen=True, kw_only=True)
class FamilyCosts(ReplicaCosts, VocabularyCosts, ShardingCosts, OffloadCosts, StepCosts):
    """The costs of all families of passes. `Costs` inherits these fields."""
