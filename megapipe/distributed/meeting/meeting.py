"""All ranks meet at one store before any group exists; who does not come is named by those who did."""

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
"""Seconds that the rank that keeps the store stays for the others to read why nobody goes on."""


def meet(rank: int, world_size: int, timeout_s: float) -> PrefixStore:
    """The store of the run's processes at MASTER_ADDR and MASTER_PORT: the launcher's, or one that rank 0 keeps.

    Raises: ConfigError if this rank does not reach it, and on all ranks alike if one has not come in time.
    """
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    limit = f"--distributed-timeout-minutes {timeout_s / 60:g}"
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = rank == 0 and not launched
    try:
        if launched and not _listens(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])):
            raise ConfigError(f"rank {rank} on {socket.gethostname()}: its launcher, which keeps {address}, has ended")
        plain = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=keeps,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=keeps,
        )
    except KeyError as error:
        raise ConfigError(f"{error.args[0]} is not set, and WORLD_SIZE is {world_size}: start with torchrun") from None
    except (RuntimeError, ValueError) as error:
        where = "could not listen at" if keeps else "did not reach the other ranks at"
        raise ConfigError(
            f"rank {rank} on {socket.gethostname()} {where} {address} ({limit}): {str(error).splitlines()[0]}\n"
            f"      Start every rank of 0..{world_size - 1} with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE; "
            "MASTER_ADDR is the machine of rank 0, and the port must be free there"
        ) from None
    # torchrun reuses its store over restarts, where a new attempt would read the addresses of dead peers. One that
    # rank 0 keeps is new; a launcher that took another's place has counted fewer restarts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if launched else ""
    # A second mesh of the same processes must not read the first one's roll, facts and addresses.
    mesh = next(_meshes())
    store = PrefixStore(f"attempt{attempt}" + f" mesh{mesh}" * (mesh > 0), plain)
    try:
        problem = call_the_roll(PrefixStore("roll", store), rank, world_size, timeout_s)
    except RuntimeError as error:
        problem = f"rank 0 or the launcher at its place has ended again ({str(error).splitlines()[0]})"
    if problem:
        if keeps:
            time.sleep(STAY_S)
        raise ConfigError(
            f"{problem}, within {limit}, to {address}\n"
            f"      Start every rank of 0..{world_size - 1} with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, "
            f"or wait longer: --distributed-timeout-minutes {max(10, timeout_s / 30):g}"
        )
    return store


@cache
def _meshes() -> Iterator[int]:
    """Return the one count of meshes that this process has met for."""
    return count()


def call_the_roll(store: PrefixStore, rank: int, world_size: int, timeout_s: float) -> str:
    """Wait for all ranks, in three requests of each. Returns: empty, or who is missing; the same on all ranks."""
    store.append("here", f"{rank}@{socket.gethostname()} ")  # type: ignore[attr-defined]
    # The last to come says it for all: three requests of a rank, however many there are.
    if store.add("count", 1) == world_size:
        store.set("result", MET)
    try:
        store.wait(["result"], timedelta(seconds=timeout_s))
    except RuntimeError:  # the first whose time is over says it for all
        here = dict(entry.split("@", 1) for entry in store.get("here").decode().split())
        store.compare_set("result", "", _missing({int(r): host for r, host in here.items()}, world_size))
    result = str(store.get("result").decode())
    return "" if result == MET else result


def _listens(host: str, port: int) -> bool:
    """Does anybody listen there? Not if the system refuses: torchrun opens its store before it starts a rank."""
    for _ in range(3):
        try:
            socket.create_connection((host, port), 5).close()
        except ConnectionRefusedError:
            time.sleep(0.5)
        except OSError:
            return True  # no answer is no refusal
        else:
            return True
    return False


def _missing(here: dict[int, str], world_size: int) -> str:
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    for rank, host in here.items():
        hosts[host].append(rank)
    there = "; ".join(f"{_ranks(ranks)} on {host}" for host, ranks in hosts.items())
    return f"{_ranks(set(range(world_size)) - here.keys())} of {world_size} did not come (here: {there})"


def _ranks(numbers: Iterable[int]) -> str:
    """Runs of consecutive numbers as 3..7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    alone = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank{'s' * (not alone)} " + ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
