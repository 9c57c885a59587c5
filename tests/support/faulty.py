"""pretrain_gpt.py with something going wrong: python faulty.py FAULT FOLDER <flags>.

In the third step the second-last rank is about to send its forward of microbatch 2, or the last one (halt) to begin.
When it went wrong is written to FOLDER/time.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megapipe.pipeline_parallel.messages.messenger import Messenger
from megapipe.training.steps.stages import Stages
from pretrain_gpt import main

FAULT, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
track, run, calls = Messenger._track, Stages.run, []


def fail(process: int, number: int) -> None:
    (FOLDER / "time").write_text(str(time.time()))
    os.kill(process, number)
    time.sleep(1)  # until it has come through


def faulty_track(self, messages, ops):
    hit = [str(message.made_by) == f"{WORLD - 2}F2" for message in messages]
    calls.extend(filter(None, hit))
    if any(hit) and len(calls) == 3:
        if FAULT == "skip":
            messages, ops = ([x for x, h in zip(xs, hit, strict=True) if not h] for xs in (messages, ops))
            (FOLDER / "time").write_text(str(time.time()))
        else:
            number = signal.SIGSTOP if FAULT == "stop" else signal.SIGKILL
            fail(os.getppid() if FAULT == "orphan" else os.getpid(), number)
    return track(self, messages, ops)


def faulty_run(self, microbatches, consumed, **kwargs):
    if consumed == 2 * self.config.global_batch_size:
        if FAULT == "interrupt":
            fail(os.getpid() if WORLD == 1 else os.getppid(), signal.SIGINT)
        if FAULT == "halt":
            fail(os.getpid(), signal.SIGSTOP)
        (FOLDER / "time").write_text(str(time.time()))
        consumed += self.config.global_batch_size
    return run(self, microbatches, consumed, **kwargs)


if FAULT in ("skip", "kill", "stop", "orphan") and RANK == WORLD - 2:
    Messenger._track = faulty_track
if (FAULT in ("ahead", "interrupt") and RANK == 0) or (FAULT == "halt" and RANK == WORLD - 1):
    Stages.run = faulty_run
sys.argv = [sys.argv[0]]
main(Path(FOLDER, "flags").read_text().split())
