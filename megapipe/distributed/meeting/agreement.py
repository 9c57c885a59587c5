"""Check that all ranks agree before they begin, over the launcher's store, before any group exists.

Ranks with other sizes would wait for each other in groups that do not fit together, until the
timeout. Ranks with other data or other code would train a wrong model without a sign of it.
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
"""Most differing ranks whose facts an error shows, in addition to rank 0."""
GRACE_S = 30.0
"""Seconds that rank 0, which may host the store, waits for other ranks to read from it."""


def agree(store: Store, rank: int, world_size: int, facts: Mapping[str, str]) -> None:
    """Compare facts, such as values of flags, that must be equal on all ranks.

    If they are equal, each rank makes at most six small requests, at any world size.

    Args:
        store: a store that the ranks share, without keys of an earlier comparison.
        facts: {name that a user knows, such as a flag or a file: value}.
    Raises: ConfigError, the same on all ranks, with the values of each differing fact. It names
        rank 0 and at most SHOWN ranks that differ from it.
    """
    text = json.dumps(facts, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if rank == 0:
        store.set("facts of 0", text)
        store.set("digest", digest)
    elif store.get("digest").decode() != digest:
        # Only ranks that differ store their facts, so that rank 0's host serves few requests.
        store.set(f"facts of {rank}", text)
        store.set(f"differing {store.add('differing', 1)}", str(rank))
    _all_here(store, "compared", world_size)
    # Adding 0 reads the counter, which does not exist if no rank has differed.
    count = store.add("differing", 0)
    if count:
        shown = range(1, min(count, SHOWN) + 1)
        ranks = [0, *sorted(int(store.get(f"differing {n}")) for n in shown)]
        everyone = {r: json.loads(store.get(f"facts of {r}")) for r in ranks}
        _leave_together(store, rank, world_size)
        raise ConfigError(_differences(everyone, count))


def taken(store: Store, gpu: str | None) -> dict[str, str]:
    """Return a fact by which `agree` fails if two ranks use one GPU, where NCCL would deadlock.

    The value is "its own" for the first rank that calls this with a GPU. For any later rank with
    the same GPU, the value names the GPU.

    Args:
        store: a store that the ranks share, only for this purpose.
        gpu: the GPU's name, unique in the world; None for a CPU, which ranks may share.
    Returns: {name of the fact: its value}; {} for a CPU.
    """
    if gpu is None:
        return {}
    name = (
        "the GPU (start one rank for each, or compute on the CPU with --distributed-backend gloo)"
    )
    is_first = store.add(gpu, 1) == 1
    return {name: "its own" if is_first else f"{gpu}, which is another rank's"}


def agree_in(world: Axis, facts: Mapping[str, str]) -> None:
    """Compare facts that must be equal on all ranks, in a world whose groups exist already.

    Args:
        world: the axis of all ranks.
        facts: {name that a user knows, such as a flag or a file: value}.
    Raises: ConfigError, as `agree`.
    """
    everyone = world.gather_json(dict(facts))
    differing = {rank: other for rank, other in enumerate(everyone) if other != everyone[0]}
    if differing:
        # A thousand ranks that differ from rank 0 mostly differ in the same way.
        shown = dict(list(differing.items())[:SHOWN])
        raise ConfigError(_differences({0: everyone[0], **shown}, len(differing)))


def _differences(everyone: Mapping[int, Mapping[str, str]], count: int) -> list[str]:
    """Return a line of text for each fact that differs, with its values.

    Args:
        everyone: {rank: its facts} for rank 0 and some ranks that differ from it.
        count: number of ranks that differ from rank 0.
    """
    # A dictionary instead of a set keeps the order in which ranks list their facts.
    names = dict.fromkeys(name for facts in everyone.values() for name in facts)
    lines = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, facts in everyone.items():
            holders.setdefault(facts.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            values = []
            for value, ranks in holders.items():
                listed = ", ".join(map(str, ranks))
                values.append(f"{value} on rank{'s' * (len(ranks) > 1)} {listed}")
            lines.append(f"{name} differs between ranks: {'; '.join(values)}")
    more = count - (len(everyone) - 1)
    if more:
        lines.append(f"and {more} more ranks differ from rank 0")
    return lines


def _leave_together(store: Store, rank: int, world_size: int) -> None:
    """On rank 0, which may host the store, wait until all ranks have read the facts.

    Rank 0 waits for GRACE_S seconds at most. Other ranks return at once.
    """
    # The store may live in rank 0's process, which must therefore end last.
    store.add("read", 1)
    until = monotonic() + GRACE_S
    while rank == 0 and store.add("read", 0) < world_size and monotonic() < until:
        sleep(0.01)


def _all_here(store: Store, name: str, world_size: int) -> None:
    """Wait until all ranks have called this function with the same name, a key of the store."""
    # One counter and one key, so that each rank makes two requests however many there are.
    if store.add(f"{name} by", 1) == world_size:
        store.set(f"{name} by all", "")
    store.wait([f"{name} by all"])
