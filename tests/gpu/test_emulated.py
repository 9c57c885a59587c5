"""Devices that are not there have values, late copies, clocks of streams, blocks of memory and locks."""

from __future__ import annotations

import re

import pytest

from tests.gpu.devices import NEEDS_A_COMPILER, run

pytestmark = NEEDS_A_COMPILER


PROGRAM = """
import tools.proofs.gpu.emulated
import torch
from tools.proofs.gpu.emulated.streams import running

def faults_of(body):
    with running() as lib:
        torch.cuda.set_device(0)
        try:
            body()
        except RuntimeError as error:
            return "refused: " + str(error).partition(",")[0]
        return "; ".join(dict.fromkeys(text.partition(":")[0] for text in lib.faults())) or "nothing"

def pair():
    return torch.cuda.Stream(0), torch.ones(4, device="cuda:0")

def unordered():
    side, x = pair()
    with torch.cuda.stream(side):
        x.add_(1)

def ordered():
    side, x = pair()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    assert x.tolist() == [2.0] * 4

def freed(told):
    side, x = pair()
    side.wait_stream(torch.cuda.current_stream())
    host = torch.empty(4, pin_memory=True)
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    if told:
        x.record_stream(side)
    del x
    torch.cuda.synchronize()
    assert host.tolist() == [1.0] * 4

def early():
    _, x = pair()
    host = torch.empty(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    assert host.isnan().all()
    torch.cuda.synchronize()
    assert host.tolist() == [1.0] * 4

def written_again(waits):
    host = torch.ones(4).pin_memory()
    x = host.to("cuda:0", non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    host.zero_()
    x.tolist()

def pageable():
    host = torch.ones(4)
    x = host.to("cuda:0", non_blocking=True)
    host.zero_()
    assert x.tolist() == [1.0] * 4

def resized():
    x = torch.ones(64, device="cuda:0")
    x.untyped_storage().resize_(0)
    for _ in range(100):
        assert torch.zeros(64, device="cuda:0").tolist() == [0.0] * 64

for name, body in {
    "no order": unordered,
    "an order": ordered,
    "freed early": lambda: freed(False),
    "freed, and told": lambda: freed(True),
    "poison until the end": early,
    "written before the end": lambda: written_again(False),
    "written after the end": lambda: written_again(True),
    "pageable memory": pageable,
    "two devices": lambda: torch.cuda.set_device(1),
    "of the host": lambda: torch.ones(4, device="cuda:0") + torch.ones(4),
    "a number of the host": lambda: torch.ones(4, device="cuda:0") + torch.tensor(1.0),
    "new memory": lambda: torch.empty(4, device="cuda:0").isnan().all().item() or 1 / 0,
    "memory given back": resized,
}.items():
    print(name + ":", faults_of(body))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """Return what each of the programs below prints; one process runs them, as each would import torch anew.

    The first uses no memory, and looks up operations that nobody has looked up before. The second is that of memory,
    whose blocks nobody has used before.
    """
    programs = {"look ups": LOOK_UPS, "memory": MEMORY, "program": PROGRAM, "locks": LOCKS, "lengths": LENGTHS}
    programs |= {"failed": FAILED, "in turn": IN_TURN, "backward": BACKWARD, "noise": NOISE}
    texts = run("-c", "\nprint('----')\n".join(programs.values())).split("----\n")
    return dict(zip(programs, texts, strict=True))


def test_an_emulated_device_refuses_what_a_gpu_would_and_nothing_else(said: dict[str, str]) -> None:
    assert said["program"].splitlines() == [
        "no order: race; memory",
        "an order: nothing",
        "freed early: memory",
        "freed, and told: nothing",
        "poison until the end: nothing",
        "written before the end: host",
        "written after the end: nothing",
        "pageable memory: nothing",
        "two devices: device",
        "of the host: refused: Expected all tensors to be on the same device",
        "a number of the host: nothing",
        "new memory: nothing",
        "memory given back: nothing",
    ]


NOISE = """
import tools.proofs.gpu.emulated
import torch
from tools.proofs.equivalence_case import Case
from tools.proofs.gpu.emulated.check import judged, on_devices, without_noise

torch.set_num_threads(1)
case = Case("1f1b", 2, 1, (1, 1), style="gemma4", documents="both", window=0)
ranks, _ = on_devices(case)
query = ranks[1].weights["decoder.layers.1.self_attention.linear_qkv.weight"].tensor.view(-1)
for wrong in (0.0, 1e-13, 1e-10):
    query[0] += wrong
    differ = judged(case, ranks)
    left = without_noise(case, ranks, differ, late=True, timeout_s=60)
    query[0] -= wrong
    print(len(differ), *(text.partition(": weights")[0] for text in left), sep="; ")
"""


def test_noise_of_adam_hides_no_weight_that_was_wrong_once_or_has_other_bits(said: dict[str, str]) -> None:
    """Queries of a window of 0 have no gradient. One weight is right, then off as little as rounding, then by more."""
    assert said["noise"].splitlines() == [
        "2",
        "3; one device: rank 1",
        "3; one device: rank 1; a CPU: rank 1",
    ]


LOCKS = """
import tools.proofs.gpu.emulated
import faulthandler
import sys
import threading
import torch
from tools.proofs.gpu.emulated.streams import running

faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-5)
over = threading.Event()

def copies():
    torch.cuda.set_device(0)
    side, x = torch.cuda.Stream(0), torch.ones(1 << 20, device="cuda:0")
    for _ in range(30):
        host = torch.ones(1 << 20, pin_memory=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.copy_(host, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
    over.set()

def looks(device):
    torch.cuda.set_device(device)
    x = torch.ones(4, device=f"cuda:{device}")
    while not over.is_set():
        x[0]
        storage = torch.ones(4, device=x.device).untyped_storage()
        del storage

with running() as lib:
    threads = [threading.Thread(target=copies), *(threading.Thread(target=looks, args=(n,)) for n in (1, 2))]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(lib.faults() or "nothing")
faulthandler.cancel_dump_traceback_later()
"""


def test_ranks_do_not_wait_for_each_other_with_locks_of_python_and_of_the_devices(said: dict[str, str]) -> None:
    """A late copy lets go of a tensor of Python, while another rank, which has Python's lock, asks for a device."""
    assert said["locks"] == "nothing\n"


LENGTHS = """
import tools.proofs.gpu.emulated
import torch
from tools.proofs.gpu.emulated.features import FEATURES
from tools.proofs.gpu.emulated.schedules import check

torch.set_num_threads(1)
print(*check(FEATURES["lengths that vary"], graphs=False, timeout_s=60.0))
"""


def test_the_host_waits_for_a_shape_that_comes_and_not_for_one_that_goes(said: dict[str, str]) -> None:
    """A step of three microbatches on two ranks. Each gets three messages, and reads the sums of the losses once."""
    found = re.findall(r"(\w+)\.py:\d+': (\d+)", said["lengths"])
    assert found == [("messenger", "3"), ("late", "1")], said["lengths"]


BACKWARD = """
import tools.proofs.gpu.emulated
import threading, torch
from tools.proofs.gpu.emulated.schedules import Waits, devices

waits = Waits(inside={0})

class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        print(threading.current_thread() is threading.main_thread())
        grad.sum().item()
        return grad

with devices(waits=waits.hear):
    Reads.apply(torch.ones(4, device="cuda:0", requires_grad=True)).sum().backward()
print(waits.counts[0].total())
"""


def test_a_wait_in_a_backward_pass_counts_whose_thread_is_torchs_own(said: dict[str, str]) -> None:
    assert said["backward"] == "False\n1\n"


MEMORY = """
import tools.proofs.gpu.emulated
import torch
from tools.proofs.gpu.emulated.streams import running

MIB = 1 << 20

def bytes_now():
    stats = torch.cuda.memory_stats(0)
    return stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"] // MIB

with running(memory=64 * MIB) as lib:
    torch.cuda.set_device(0)
    kept = []
    for size in (1, 513, MIB, MIB + 1, 5 * MIB, 10 * MIB, 12 * MIB + 5):
        kept.append(torch.empty(size, dtype=torch.uint8, device="cuda:0"))
        print(size, *bytes_now())
    with torch.cuda.stream(torch.cuda.Stream(0)):
        kept.append(torch.empty(1, dtype=torch.uint8, device="cuda:0"))
        print("stream", *bytes_now())
    try:
        torch.empty(60 * MIB, dtype=torch.uint8, device="cuda:0")
    except torch.OutOfMemoryError as error:
        print(str(error).partition(".")[0])
    kept.clear()
    torch.cuda.empty_cache()
    print("empty", *bytes_now())
"""


def test_memory_comes_in_the_blocks_of_torchs_allocator_and_ends(said: dict[str, str]) -> None:
    """512 bytes at least. Up to 1 MiB from segments of 2 MiB, up to 10 MiB from 20 MiB, then multiples of 2 MiB."""
    mib = 1 << 20
    small = 512 + 1024 + mib
    assert said["memory"].splitlines() == [
        "1 512 2",
        "513 1536 2",
        f"{mib} {small} 2",
        f"{mib + 1} {small + mib + 512} 22",
        f"{5 * mib} {small + 6 * mib + 512} 22",
        f"{10 * mib} {small + 16 * mib + 512} 22",
        # The rest of 14 MiB is more than 1 MiB, and is cut off.
        f"{12 * mib + 5} {small + 28 * mib + 1024} 36",
        f"stream {small + 28 * mib + 1536} 38",
        "CUDA out of memory",
        "empty 0 0",
    ]


IN_TURN = """
from tools.proofs.gpu.emulated.schedules import Flags, keys
flags = Flags(pp=(2, 3, 4, 8), schedules=("a", "b"), features=("messages", "sums", "vocabulary"), in_turn=True)
print(*("{}{}{}".format(*choices[0]) for choices in keys(flags)))
"""


def test_features_take_turns_over_schedules_and_sizes(said: dict[str, str]) -> None:
    """Three ranks do not divide 32 rows of the vocabulary, and 8 ranks leave no devices for a second replica."""
    in_turn = "a2vocabulary b2messages a3sums b3messages a4sums b4vocabulary a8messages b8vocabulary\n"
    assert said["in turn"] == in_turn


LOOK_UPS = """
import tools.proofs.gpu.emulated
import sys, threading, torch
from tools.proofs.gpu.captured import Noting

Noting()
sys.setswitchinterval(1e-6)
names = [name for name in dir(torch._C._VariableFunctions) if not name.startswith("_")]
barrier = threading.Barrier(4)
found = [dict() for _ in range(4)]

def look_up(own):
    for name in names:
        barrier.wait()
        packet = getattr(torch.ops.aten, name, None)
        own[name] = packet, getattr(packet, "default", None)

threads = [threading.Thread(target=look_up, args=(own,)) for own in found]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sum(len({id(x) for own in found for x in own[name]}) > 2 for name in names), "twice")
"""


def test_threads_that_look_up_an_operation_first_find_one_object(said: dict[str, str]) -> None:
    """torch keeps a borrowed pointer to it. Without turns 5 ranks that captured graphs ended in a freed object."""
    assert said["look ups"] == "0 twice\n"


FAILED = """
import tools.proofs.gpu.emulated
import torch
from tools.proofs.gpu.emulated.streams import running

with running():
    torch.cuda.set_device(0)
    x = torch.ones(4, device="cuda:0")
    first, side = torch.cuda.current_stream(), torch.cuda.Stream(0)
    with torch.cuda.stream(side):
        side.wait_stream(first)
        x.add_(1)
with running() as lib:
    del x
    print(len(lib.faults()), "faults")
"""


def test_what_a_failed_run_frees_later_is_no_fault_of_the_next(said: dict[str, str]) -> None:
    assert said["failed"] == "0 faults\n"
