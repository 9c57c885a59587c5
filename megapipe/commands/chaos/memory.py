"""States in shared memory, as `megapipe chaos` loses and damages them."""

from __future__ import annotations

import os
import random
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from megapipe.checkpoint.memory.slots import HEADER, SHARED
from megapipe.commands.chaos.broken_run import Launched, variables


def lose(run: Launched, draw: random.Random, *, pair: bool = False, flip: bool = False) -> str:
    """Kill a rank at random and delete its folder in shared memory, as if its machine were gone.

    The folder has the training states that the rank keeps: its own, and copies for other ranks.

    Args:
        run: the launch to break.
        draw: the random generator that chooses the rank.
        pair: also kill the ranks that keep copies of the rank's state, and delete their folders.
        flip: change a byte in each copy of the rank's state.
    Returns: a line for the log; empty if no rank has such a folder.
    """
    folders = _folders(run)
    alive = {}
    for pid in run.ranks():
        local = variables(pid).get("LOCAL_RANK")
        if local is not None:
            alive[local] = pid
    if not folders.keys() & alive.keys():
        return ""
    first = draw.choice(sorted(folders.keys() & alive.keys()))
    gone = [first]
    # On one machine the local rank is the rank.
    kept = {path.stem.partition("-")[2] for path in folders[first].iterdir()}
    others = sorted(kept & folders.keys() - {first})
    changed = 0
    if pair:
        gone += others
    # Killed first: a living rank would write its state again.
    for local in gone:
        with suppress(KeyError, ProcessLookupError):
            os.kill(alive[local], signal.SIGKILL)
    if flip:
        for other in others:
            for path in folders[other].glob(f"*-{first}.*"):
                changed += _flip(path, draw)
    for local in gone:
        shutil.rmtree(folders[local], ignore_errors=True)
    text = f"SIGKILL to rank(s) {', '.join(gone)} and no more of their memory"
    return f"{text}; a byte changed in {changed} copies" if flip else text


def _folders(run: Launched) -> dict[str, Path]:
    """Return {local rank: its folder in shared memory}, such as {"0": Path(...)}."""
    found = {}
    for pid in run.pids():
        for path in SHARED.glob(f"megapipe-{os.getuid()}-{pid}-*/*"):
            found[path.name] = path
    return found


def _flip(path: Path, draw: random.Random) -> bool:
    """Change one bit of a state in memory. Return False if the state has no bytes.

    Args:
        path: the state's file in shared memory.
        draw: chooses the bit.
    """
    size = path.stat().st_size - HEADER
    if size <= 0:
        return False
    with path.open("r+b") as file:
        at = HEADER + draw.randrange(size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << draw.randrange(8)]))
    return True
