"""Two hosts on one machine: an agent of torchrun each, with its ranks."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megapipe.commands.chaos.broken_run import Launched
from tools.proofs.nodisk.__main__ import Launcher

# Without it torch 2.13 gives an agent that comes later no address of the first rank.
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
_HANGS_S = 900.0


class Hosts:
    """Hosts that start the ranks of a run: each is an agent of torchrun on this machine.

    `start` starts a host, and `kill` kills it. `train` waits for steps, `returned` for a return to
    another number of ranks, `end` for the end of all hosts. Leaving the context kills them.

    Args:
        run: the flags of the run, and the folder of its log and numbers.
        sizes: for each host, its number of ranks.
    """

    def __init__(self, run: Launcher, sizes: Sequence[int]) -> None:
        self._run = run
        self._sizes = sizes
        self._running: dict[int, Launched] = {}
        self._starts = 0
        # Agents meet here, and not at one of them: any of them may be killed.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in list(self._running):
            self.kill(host)

    def start(self, host: int) -> None:
        """Start a host, which waits for the others."""
        folder = self._run.folder
        command = (
            f"{sys.executable} -m torch.distributed.run --nnodes 1:{len(self._sizes)} "
            f"--nproc-per-node {self._sizes[host]} --max-restarts 20 --rdzv-backend c10d "
            f"--rdzv-endpoint 127.0.0.1:{self._store.port} --rdzv-id run "
            "--rdzv-conf is_host=0,last_call_timeout=3 -m tools.proofs.nodisk.rank "
            f"{folder}/log-ranks {folder}/numbers"
        )
        log = folder / f"host-{host}-{self._starts}"
        self._starts += 1
        self._running[host] = Launched([*command.split(), *self._run.flags], log)

    def kill(self, host: int) -> None:
        """Kill an agent and its ranks, as if the host had lost its power."""
        self._running.pop(host).end()

    def train(self, steps: int) -> None:
        """Wait until the run has trained so many steps more.

        Raises: SystemExit if a host ends before, or after 15 minutes.
        """
        goal = self._step() + steps
        self._wait(f"step {goal}", lambda: self._step() >= goal)

    def returned(self, before: int, now: int) -> None:
        """Wait until a run of `before` ranks goes on in memory with `now` ranks.

        Raises: SystemExit if a host ends before, or after 15 minutes.
        """
        text = re.compile(rf"were {before} .* are {now}\b")
        event = f"return from {before} to {now} ranks"
        self._wait(event, lambda: any(map(text.search, self._run.said())))

    def _step(self) -> int:
        """Return the last step that was trained; 0 before the first."""
        if not (self._run.folder / "numbers").exists():
            return 0
        return max((row["step"] for row in self._run.rows() if "step" in row), default=0)

    def _wait(self, event: str, came: Callable[[], bool]) -> None:
        until = time.monotonic() + _HANGS_S
        while not came():
            ended = [host for host, one in self._running.items() if one.poll() is not None]
            if ended or time.monotonic() > until:
                raise SystemExit(f"no {event}: hosts {ended} have ended, see {self._run.folder}")
            time.sleep(0.1)

    def end(self) -> None:
        """Wait until all hosts have ended.

        Raises: SystemExit if one of them reports an error.
        """
        for host, running in self._running.items():
            if code := running.wait():
                raise SystemExit(f"host {host} ends with {code}, see {self._run.folder}")
