"""A rank of a run that is killed at a drawn pass, or while its state is copied, restored or saved.

It is forked from a process that has imported everything, and does what `pretrain_gpt.py` does. As
`python -m tools.proofs.nodisk.rank LOG NUMBERS FLAGS` it is a program for torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from megapipe.checkpoint import commit, shards
from megapipe.checkpoint.memory import back, copies, slots
from megapipe.config import Config
from megapipe.data.loader import tokens_of
from megapipe.errors import UserError
from megapipe.flags.parse import parse
from megapipe.flags.stop import stop
from megapipe.pipeline_parallel import execute
from megapipe.training import driver
from megapipe.training.pretrain import pretrain

PRELOADED = (shards,)
"""What a rank would import after its fork."""
PLACES = ("pass", "copy", "seal", "return", "save")


@dataclass(frozen=True)
class Death:
    """When a rank ends by SIGKILL.

    Attributes:
        rank: of the world.
        place: one of PLACES: an item of the program, a copy, the end of a copy, the return to a
            state in memory, a save to disk.
        step: steps of this attempt before it, for a place in a step.
        count: how often the place is passed before it, within the step for an item.
    """

    rank: int
    place: str
    step: int
    count: int


def run(
    flags: Sequence[str], env: Mapping[str, str], log: Path, numbers: Path, death: Death | None
) -> int:
    """Train in this process, and return the exit status.

    Args:
        flags: of `pretrain_gpt.py`.
        env: variables of the launcher.
        log: gets what the rank prints.
        numbers: gets a line of JSON for each step, with its losses and its norm to the bit, and one
            for each file of a checkpoint that is opened for reading.
        death: when this process is killed; None for never.
    """
    os.environ.update(env)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    rank = int(env["RANK"])
    _note_numbers(numbers, writes=rank == 0)
    if death is not None and death.rank == rank:
        _arrange(death)
    try:
        pretrain(parse(Config, list(flags)))
    except SystemExit as error:
        return int(error.code or 0)
    except (UserError, KeyboardInterrupt) as error:
        # torchrun keeps it for its last report.
        print(error, flush=True)
        try:
            stop(error)
        except SystemExit as ended:
            return int(ended.code or 1)
    except BaseException:
        # Nothing else prints it: a fork ends by os._exit.
        traceback.print_exc()
        return 70
    return 0


def _note_numbers(path: Path, *, writes: bool) -> None:
    def note(**row: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    ended = driver.Driver.ended

    def after(self: driver.Driver, result: Any) -> None:
        if writes:
            losses = {name: value.hex() for name, value in result.losses.items()}
            n = self.run.progress.iteration
            note(step=n, losses=losses, norm=float(result.grad_norm).hex())
        ended(self, result)

    driver.Driver.ended = after  # type: ignore[method-assign]
    batches = driver.Driver._batches

    def read(self: driver.Driver, consumed: int) -> Any:
        step = batches(self, consumed)
        # Of the passes: without a rank there is one pipeline of all ranks.
        mesh = self.run.stages.mesh
        if mesh.pp.rank == mesh.tp.rank == 0:
            sums = [crc32(tokens_of(x).numpy().tobytes()) for x in step]
            note(samples=sums, before=consumed, dp=mesh.dp.size, replica=mesh.dp.rank)
        return step

    driver.Driver._batches = read  # type: ignore[method-assign]

    def audit(event: str, args: tuple[Any, ...]) -> None:
        # Files of checkpoints that are read: every file of a folder iter_0000010.
        if event != "open" or not isinstance(args[0], str) or "/iter_" not in args[0]:
            return
        if isinstance(args[1], str) and args[1].startswith("r"):
            note(read=args[0])

    sys.addaudithook(audit)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arrange(death: Death) -> None:
    """Let this process be killed at the place of a death."""
    steps = [-1]
    counts = [0]

    def counted(function: Callable[..., Any], *, of_step: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not of_step or steps[0] >= death.step:
                if counts[0] == death.count:
                    _die()
                counts[0] += 1
            return function(*args, **kwargs)

        return call

    whole = driver.Driver.step

    def step(self: driver.Driver, *args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        return whole(self, *args, **kwargs)

    driver.Driver.step = step  # type: ignore[method-assign]
    owner: Any
    if death.place == "pass":
        owner, name = execute._Runs, "item"
    elif death.place == "copy":
        owner, name = copies.Copies, "_send"
    elif death.place == "seal":
        owner, name = slots.Slot, "seal"
    elif death.place == "return":
        owner, name = back._Generation, "bring"
    else:
        owner, name = commit, "digest"
    of_step = death.place in ("pass", "copy", "seal")
    setattr(owner, name, counted(getattr(owner, name), of_step=of_step))


if __name__ == "__main__":
    _, LOG, NUMBERS, *FLAGS = sys.argv
    sys.exit(run(FLAGS, os.environ, Path(LOG), Path(NUMBERS), None))
