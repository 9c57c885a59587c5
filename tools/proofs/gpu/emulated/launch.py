"""Whole programs on emulated devices: ranks are processes over groups with NCCL's rules.

    python -m tools.proofs.gpu.emulated.launch --ranks 2 -- <flags of pretrain_gpt.py>

Each rank is a fork of one process that has imported torch. What a GPU would refuse ends a rank with
status 1 and the faults.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # it cannot be imported where torch.cuda is emulated
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import GroupName

from tools.proofs.gpu.emulated import nccl
from tools.proofs.gpu.emulated.streams import Event, Library, wait_clock

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Told(nccl.Shared):
    """What ranks know that are processes: each puts the clocks of its parts into a store.

    Without the clocks a rank would not know that its message has gone when the answer has come.
    What the ranks bring is not compared here.

    Attributes:
        store: of the communicator.
    """

    store: Any = None

    def begin(self, part: tuple[object, ...], end: Event) -> None:
        """Let the other ranks know the clock of a part of this rank."""
        self.store.set(repr(part), end.clock())

    def wait(self, part: tuple[object, ...]) -> None:
        """Let the current stream wait for a part of another rank, if that has begun."""
        if self.store.check([repr(part)]):
            wait_clock(self.store.get(repr(part)))


# The communicator's operations take the arguments that are used, not all those of torch's stubs.
class Group(nccl.Communicator, dist.ProcessGroup):  # type: ignore[misc]
    """torch's ProcessGroupNCCL, of one process."""

    class Options:
        """Its options; they change nothing."""

        is_high_priority_stream = False

        def __init__(self) -> None:
            self.config = SimpleNamespace()
            self._timeout = timedelta(minutes=10)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        # The stubs lack the constructor of groups that are written in Python.
        dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]
        inner = dist.ProcessGroup(PrefixStore("gloo", store), rank, size)
        gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options._timeout)
        inner._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        device = torch.device("cuda", torch.cuda.current_device())
        # A copy of the store: a rank that waits in the first one, for a group, holds up its users.
        told = Told(store=PrefixStore("clocks", store.clone()))
        ranks = options.global_ranks_in_group
        nccl.Communicator.__init__(self, inner, f"{options.group_name} {ranks}", rank, told, device)
        self.options = options

    # On an instance the communicator's text of the same name stands before it.
    def name(self) -> str:  # type: ignore[override]
        return "nccl"

    def getBackendName(self) -> str:
        return "nccl"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    # The group is its own backend without being one of torch's class.
    def _get_backend(self, device: object) -> Group:  # type: ignore[override]
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """gloo keeps its own."""

    def _set_sequence_number_for_group(self) -> None:
        """Nothing is numbered."""

    supports_splitting = False

    @property
    def group_name(self) -> GroupName:
        return GroupName(str(self.options.group_name))

    @property
    def pg_name(self) -> str:
        return self.group_name

    def shutdown(self) -> None:
        """Threads end with the process."""


@contextmanager
def world() -> Iterator[Any]:
    """Inside, torch.distributed has NCCL, and torch.cuda devices."""
    from tools.proofs.gpu.emulated.ranks import devices

    c10d = dist.distributed_c10d
    with ExitStack() as stack:
        lib = stack.enter_context(devices())
        stack.enter_context(mock.patch.object(c10d, "_NCCL_AVAILABLE", True))
        stack.enter_context(mock.patch.object(c10d, "ProcessGroupNCCL", Group, create=True))
        yield lib


def _port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start(
    ranks: int,
    argv: Sequence[str],
    folder: Path,
    before: Callable[[Library], None] = lambda lib: None,
    after: Callable[[Library], None] = lambda lib: None,
) -> list[str]:
    """Run pretrain_gpt.py with these flags, a process and a device for each rank.

    Args:
        folder: for the ranks' output.
        before, after: called by each rank before and after its training.
    Returns: the output, in the order of ranks.
    Raises: RuntimeError if a rank fails, or a GPU would have refused something.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, children = _port(), dict[int, int]()
    for rank in range(ranks):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            places = {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {name: str(x) for name, x in (numbers | places).items()}
            _rank(argv, folder / f"rank{rank}.txt", before, after)
        children[child] = rank
    codes = {}
    while children:
        child, status = os.wait()
        code = codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
        # The others would wait for a rank that has failed.
        for other in children if code > 0 else ():
            os.kill(other, signal.SIGKILL)
    texts = [(folder / f"rank{rank}.txt").read_text() for rank in range(ranks)]
    bad = sorted((rank for rank, code in codes.items() if code), key=lambda rank: -codes[rank])
    if bad:
        raise RuntimeError(f"rank {bad[0]} ends with {codes[bad[0]]}:\n{texts[bad[0]][-3000:]}")
    return texts


def _rank(
    argv: Sequence[str],
    log: Path,
    before: Callable[[Library], None],
    after: Callable[[Library], None],
) -> None:
    """Be the rank of the environment; it does not return."""
    status = 1
    try:
        with log.open("w", buffering=1) as out:
            for number in (1, 2):
                os.dup2(out.fileno(), number)
            torch.set_num_threads(1)
            with world() as lib:
                import pretrain_gpt

                before(lib)
                pretrain_gpt.main([*argv])
                faults = lib.faults()
                after(lib)
            print(*faults[:5], sep="\n")
            status = int(bool(faults))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    count = int(sys.argv[sys.argv.index("--ranks") + 1])
    with tempfile.TemporaryDirectory(prefix="emulated-") as place:
        for text in start(count, sys.argv[sys.argv.index("--") + 1 :], Path(place)):
            print(text)
