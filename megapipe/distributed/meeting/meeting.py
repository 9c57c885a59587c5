"""Let all ranks meet at one store before any group exists.

If a rank does not come, the others name it in their error.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import cache
from itertools import count

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from megapipe.errors import ConfigError

MET = "met"
STAY_S = 1.0
"""Seconds that the rank with the store stays after an error, for others to read the reason."""


def meet(rank: int, world_size: int, timeout_s: float) -> PrefixStore:
    """Return a store that all processes share, once all ranks are there.

    The store is at MASTER_ADDR and MASTER_PORT. Either torchrun hosts it, or rank 0.

    Args:
        rank: the global rank.
        world_size: number of ranks.
        timeout_s: seconds to wait for the store and for all ranks.
    Raises: ConfigError if this rank does not reach the store, or if MASTER_ADDR or MASTER_PORT is
        not set. ConfigError with the same list on all ranks if some ranks have not come in time.
    """
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    limit = f"--distributed-timeout-minutes {timeout_s / 60:g}"
    here = f"rank {rank} on {socket.gethostname()}"
    start = (
        f"Start every rank of 0..{world_size - 1} with the same MASTER_ADDR, MASTER_PORT and "
        "WORLD_SIZE"
    )
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = rank == 0 and not launched
    try:
        host = os.environ["MASTER_ADDR"]
        if launched and not _listens(host, int(os.environ["MASTER_PORT"])):
            raise ConfigError(f"{here}: its launcher, which keeps {address}, has ended")
        plain = TCPStore(
            host,
            int(os.environ["MASTER_PORT"]),
            is_master=hosts,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=hosts,
        )
    except KeyError as error:
        raise ConfigError(
            f"{error.args[0]} is not set, and WORLD_SIZE is {world_size}: start with torchrun"
        ) from None
    except (RuntimeError, ValueError) as error:
        failure = "could not listen at" if hosts else "did not reach the other ranks at"
        raise ConfigError(
            f"{here} {failure} {address} ({limit}): {str(error).splitlines()[0]}\n"
            f"      {start}; MASTER_ADDR is the machine of rank 0, and the port must be free there"
        ) from None
    # torchrun reuses its store after a restart, and a new attempt would read the addresses of dead
    # processes there. A store that rank 0 hosts is new; there, a replaced launcher has counted
    # fewer restarts than the others, and its ranks would look under another prefix.
    prefix = "attempt"
    if launched:
        prefix += os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # A second mesh of the same processes must not read the entries of the first one.
    mesh = next(_meshes())
    if mesh > 0:
        prefix += f" mesh{mesh}"
    store = PrefixStore(prefix, plain)
    try:
        problem = call_the_roll(PrefixStore("roll", store), rank, world_size, timeout_s)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        problem = f"rank 0 or the launcher at its place has ended again ({reason})"
    if problem:
        if hosts:
            time.sleep(STAY_S)
        raise ConfigError(
            f"{problem}, within {limit}, to {address}\n"
            f"      {start}, or wait longer: "
            f"--distributed-timeout-minutes {max(10, timeout_s / 30):g}"
        )
    return store


# Cached, so that there is one counter per process.
@cache
def _meshes() -> Iterator[int]:
    """Return this process's counter: `next` yields 0 for its first mesh, 1 for the second, ..."""
    return count()


def call_the_roll(store: PrefixStore, rank: int, world_size: int, timeout_s: float) -> str:
    """Wait until all ranks have called this function.

    If all come, each rank makes four requests to the store, and the last one to come five.

    Args:
        store: a store that the ranks share, without keys of an earlier call.
        rank: the global rank.
        timeout_s: seconds to wait.
    Returns: "" if all ranks have come, else a text that names the missing ranks; equal on all
        ranks.
    Raises: RuntimeError if the store is gone.
    """
    store.append("here", f"{rank}@{socket.gethostname()} ")  # type: ignore[attr-defined]
    # The last rank to come answers for all, so that the number of requests per rank is constant.
    if store.add("count", 1) == world_size:
        store.set("result", MET)
    try:
        store.wait(["result"], timedelta(seconds=timeout_s))
    except RuntimeError:
        # The first rank whose time is over answers for all; compare_set keeps an earlier answer.
        entries = store.get("here").decode().split()
        here = dict(entry.split("@", 1) for entry in entries)
        missing = _missing({int(r): host for r, host in here.items()}, world_size)
        store.compare_set("result", "", missing)
    result = str(store.get("result").decode())
    return "" if result == MET else result


def _listens(host: str, port: int) -> bool:
    """Return whether a process may listen at a port of a host.

    The result is False if three connections in a row are refused. torchrun opens its store before
    it starts a rank, so a refused connection means that it has ended.
    """
    for _ in range(3):
        try:
            socket.create_connection((host, port), 5).close()
        except ConnectionRefusedError:
            time.sleep(0.5)
        # No answer, perhaps because of a slow network, is not a refusal.
        except OSError:
            return True
        else:
            return True
    return False


def _missing(here: dict[int, str], world_size: int) -> str:
    """Return a text that names the ranks that did not come, and the hosts of the other ranks.

    Args:
        here: {rank that has come: its host}.
    """
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    for rank, host in here.items():
        hosts[host].append(rank)
    listed = "; ".join(f"{_ranks(ranks)} on {host}" for host, ranks in hosts.items())
    missing = _ranks(set(range(world_size)) - here.keys())
    return f"{missing} of {world_size} did not come (here: {listed})"


def _ranks(numbers: Iterable[int]) -> str:
    """Return a text for ranks, with consecutive ranks as a range: "ranks 0, 3..7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    is_single = len(runs) == 1 and runs[0][0] == runs[0][1]
    word = "rank" if is_single else "ranks"
    return f"{word} " + ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
