"""Trainings on CUDA devices that are not there, and ranks that are processes with a device each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT

from tests.gpu.devices import NEEDS_A_COMPILER, run

pytestmark = NEEDS_A_COMPILER

EACH_NIGHT = pytest.mark.skipif(not os.environ.get("MEGAPIPE_NIGHTLY"), reason="scripts/nightly.sh runs it")


def test_some_trainings_have_the_numbers_of_one_device_and_of_a_cpu() -> None:
    """Messages, copies, sums, gathers and graphs; all, and drawn ones: tools/proofs/gpu/emulated."""
    said = run("-m", "tools.proofs.gpu.emulated.features", "--suite")
    assert said.splitlines()[-1].endswith("trainings, 0 fail"), said


@EACH_NIGHT
def test_a_whole_program_goes_on_with_the_same_digits_in_its_layout_and_in_another() -> None:
    """Two processes with a device each. On GPUs alone, an earlier version went on from random main weights."""
    said = run("-m", "tools.proofs.gpu.emulated.resumed", "--quick")
    assert said.splitlines()[-1] == "1 programs, 0 fail", said


PROCESSES = """
import tools.proofs.gpu.emulated
import os
import sys
import torch
import torch._dynamo
import torch.distributed as dist
from tools.proofs.gpu.emulated.launch import world

store, number = sys.argv[1:]

def sends(x, link):
    \"\"\"Rank 0 sends x, and does not wait until it has gone.\"\"\"
    if dist.get_rank():
        dist.irecv(x, 0, link).wait()
    else:
        kept.append(dist.isend(x, 1, link))

def unanswered(y, link):
    pass

def answered(y, link):
    if dist.get_rank():
        dist.isend(y, 0, link).wait()
    else:
        dist.irecv(y, 1, link).wait()

def summed(y, link):
    dist.all_reduce(y, group=link)

def gathered(y, link):
    dist.all_gather_into_tensor(y.new_empty(8), y, group=link)

def lists(y, root):
    return [torch.ones_like(y) for _ in range(2)] if dist.get_rank() == root else None

def meet(work):
    \"\"\"Wait for the work after both ranks have begun it.\"\"\"
    meetings.append(work)
    for rank in (int(number), 1 - int(number)):
        key = f"{len(meetings)} {rank}"
        board.set(key, "") if rank == int(number) else board.wait([key])
    work.wait()

def told_by(root):
    return lambda y, link: meet(dist.broadcast(y, root, link, async_op=True))

def gathers_to(root):
    return lambda y, link: meet(dist.gather(y, lists(y, root), root, link, async_op=True))

def scattered_by(root):
    return lambda y, link: meet(dist.scatter(y, lists(y, root), root, link, async_op=True))

def rows_from(sender):
    def body(y, link):
        mine = dist.get_rank()
        leaving = [4 if mine == sender and n != mine else 0 for n in range(2)]
        arriving = [4 if mine != sender and n == sender else 0 for n in range(2)]
        out = y.new_empty(sum(arriving))
        meet(dist.all_to_all_single(out, y[: sum(leaving)], arriving, leaving, link, async_op=True))
    return body

kept, meetings = [], []
board = dist.FileStore(store + " board", 2)
bodies = {body.__name__: body for body in (unanswered, answered, summed, gathered)}
for kind in (told_by, gathers_to, scattered_by, rows_from):
    bodies |= {f"{kind.__name__} {rank}": kind(rank) for rank in range(2)}
with world() as lib:
    device = torch.device("cuda", int(number))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", f"file://{store}", rank=int(number), world_size=2)
    for name, body in bodies.items():
        first, second = [dist.new_group([0, 1]) for _ in range(2)]
        x, y = (torch.ones(4, device=device) for _ in range(2))
        before = len(lib.faults())
        sends(x, first)
        body(y, second)
        x.add_(1)
        torch.cuda.synchronize()
        if device.index == 0:
            new = [text.partition(":")[0] for text in lib.faults()[before:]]
            print(name + ":", *new or ["nothing"], flush=True)
sys.stdout.flush()
os._exit(0)
"""


def test_a_rank_that_is_a_process_knows_what_another_has_got_and_nothing_more(tmp_path: Path) -> None:
    """What was sent may be written again after an answer, which proves that it has come, and not before.

    Rank 0 has an answer where data of rank 1 come to it: the root of a gather, and all but the root of others.
    """
    given = ["-c", PROCESSES, str(tmp_path / "store")]
    other = subprocess.Popen([sys.executable, "-W", "ignore", *given, "1"], cwd=ROOT)
    try:
        said = run(*given, "0")
    finally:
        other.kill()
        other.wait()
    assert said.splitlines() == [
        "unanswered: race",
        "answered: nothing",
        "summed: nothing",
        "gathered: nothing",
        "told_by 0: race",
        "told_by 1: nothing",
        "gathers_to 0: nothing",
        "gathers_to 1: race",
        "scattered_by 0: race",
        "scattered_by 1: nothing",
        "rows_from 0: race",
        "rows_from 1: nothing",
    ]
