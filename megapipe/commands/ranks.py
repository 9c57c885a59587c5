"""Run a function in several processes of this machine, as the ranks of a run."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def run_ranks(
    size: int, work: Callable[..., Any], *given: Any, preload: tuple[str, ...] = ()
) -> list[Any]:
    """Run work(*given) in `size` processes. Return their results in the order of ranks.

    Each process has the environment from which torch.distributed finds the others.

    Args:
        size: the number of processes.
        work: a function whose result can be pickled.
        given: the arguments of `work`, the same for every rank.
        preload: modules that a new server process imports before it forks the ranks. If empty, this
            process forks the ranks itself.
    Raises: SystemExit if a rank fails.
    """
    context: Any = multiprocessing.get_context("forkserver" if preload else "fork")
    if preload:
        context.set_forkserver_preload(list(preload))
    # The system chooses a free port, on which the ranks will meet.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=_rank, args=(rank, size, port, sender, work, given), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process, (_, sender) in zip(ranks, pipes, strict=True):
        process.start()
        # Only the rank may hold this end: its death then ends the pipe, and recv() does not
        # deadlock.
        sender.close()
    try:
        return [receiver.recv() for receiver, _ in pipes]
    except EOFError:
        raise SystemExit(f"{Path(sys.argv[0]).name}: a rank failed; its error is above") from None
    finally:
        for process in ranks:
            process.join(timeout=30)


def _rank(
    rank: int, size: int, port: int, sender: Any, work: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    """Run `work(*given)` on one rank, and send its result to the parent.

    Args:
        size: the number of ranks.
        port: the port of torch.distributed's store on this machine.
        sender: the connection to the parent.
    """
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    # All ranks share the cores of this machine.
    torch.set_num_threads(1)
    sender.send(work(*given))
