"""Agreement of all ranks before they begin, over the launcher's store, before any group exists.

Ranks with other sizes would meet in groups that do not fit together and wait for each other until the timeout; ranks
with other data or code would train something that nobody asked for, unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from time import monotonic, sleep

from torch.distributed import Store  # type: ignore[attr-defined]

from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError

SHOWN = 16
"""Ranks whose facts an error reads, beside the first's."""
GRACE_S = 30.0
"""Seconds that the first rank keeps the store for others that still read."""


def agree(store: Store, rank: int, world_size: int, facts: Mapping[str, str]) -> None:
    """Compare what must be equal on all ranks. Five small requests of a rank if it is.

    Args:
        store: shared by the ranks, without keys of an earlier comparison.
        facts: by what a user calls them, a flag or a file.
    Raises: ConfigError on all ranks alike, each differing fact with its values and their ranks.
    """
    text = json.dumps(facts, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if rank == 0:
        store.set("facts of 0", text)
        store.set("digest", digest)
    elif store.get("digest").decode() != digest:
        store.set(f"facts of {rank}", text)
        store.set(f"differing {store.add('differing', 1)}", str(rank))
    _all_here(store, "compared", world_size)
    if count := store.add("differing", 0):
        ranks = [0, *sorted(int(store.get(f"differing {n}")) for n in range(1, min(count, SHOWN) + 1))]
        everyone = {r: json.loads(store.get(f"facts of {r}")) for r in ranks}
        _leave_together(store, rank, world_size)
        raise ConfigError(_differences(everyone, count))


def taken(store: Store, gpu: str | None) -> dict[str, str]:
    """The fact that differs between ranks if two of them have taken one GPU; NCCL would fail or wait for ever.

    Args:
        gpu: its name among all of the world's; None for a CPU, which ranks share.
    """
    if gpu is None:
        return {}
    owner = "its own" if store.add(gpu, 1) == 1 else f"{gpu}, which is another rank's"
    return {"the GPU (start one rank for each, or compute on the CPU with --distributed-backend gloo)": owner}


def agree_in(world: Axis, facts: Mapping[str, str]) -> None:
    """Agreement in a world of groups that is there already. Raises: ConfigError on all ranks alike."""
    everyone = world.gather_json(dict(facts))
    differing = {rank: other for rank, other in enumerate(everyone) if other != everyone[0]}
    if differing:
        shown = dict(list(differing.items())[:SHOWN])
        raise ConfigError(_differences({0: everyone[0], **shown}, len(differing)))


def _differences(everyone: Mapping[int, Mapping[str, str]], count: int) -> list[str]:
    names = dict.fromkeys(name for facts in everyone.values() for name in facts)
    lines = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, facts in everyone.items():
            holders.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            values = (
                f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for value, ranks in holders.items()
            )
            lines.append(f"{name} differs between ranks: {'; '.join(values)}")
    more = count - (len(everyone) - 1)
    return [*lines, f"and {more} more ranks differ from rank 0"] if more else lines


def _leave_together(store: Store, rank: int, world_size: int) -> None:
    """The store may live in the first rank, which therefore ends last: when all have read, they ask it nothing more."""
    store.add("read", 1)
    until = monotonic() + GRACE_S
    while rank == 0 and store.add("read", 0) < world_size and monotonic() < until:
        sleep(0.01)


def _all_here(store: Store, name: str, world_size: int) -> None:
    if store.add(f"{name} by", 1) == world_size:
        store.set(f"{name} by all", "")
    store.wait([f"{name} by all"])
