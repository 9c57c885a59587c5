"""End a run that cannot go on: say where ranks are and which one holds up the others, then exit.

A thread watches, because the main thread may be in a call that never returns. Ranks exchange their
reports over the launcher's store, which does not need the broken process groups. Exit codes are in
docs/troubleshooting.md.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from torch.distributed import DistStoreError, PrefixStore  # type: ignore[attr-defined]

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import UserError
from megapipe.pipeline_parallel.watch.diagnosis import (
    TERMINATED,
    Report,
    first_mismatch,
    is_lost,
    report_of,
    short,
)

T = TypeVar("T")

# Exit codes.
FAULT = 1
"""An error of this rank's own."""
LOST = 3
"""A message or collective failed."""
STUCK = 4
"""A call did not return in time."""

LAUNCHER = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
"""The process of torchrun. None if the rank was started by hand: it may outlive its shell."""

POLL_S = 1.0
ANSWER_S = 3.0
"""Seconds that the other ranks have to report."""
SILENCE_S = 20.0
"""Seconds that the ranks' store may owe answers before it counts as gone.

A process that ends closes its connections, which is noticed at once. So this is for a stopped
process and for a machine that is cut off. A healthy store was 16 s late where 100 programs shared
two cores.
"""
RELAY_S = 5.0
"""Seconds after a Ctrl-C in which torchrun may still pass it on.

The terminal has sent that Ctrl-C to every process already, so it comes twice.
"""
GRACE_S = 1.0
"""Seconds that a call may take beyond the timeout before it counts as one that never returns."""
PAUSE_S = 0.05
"""Seconds between two questions to the store."""


class Watch:
    """A guard of one rank's run while its context is entered: `with Watch(mesh): train()`.

    When a message or collective fails or times out, or a rank ends in an error or disappears, the
    run ends. Each rank prints one line, and one rank also the first mismatch: who waits for whom.
    The process exits with a code that says why. Ctrl-C ends it with 130, SIGTERM with 143, unless
    the run has a handler of its own.

    UserError and SystemExit pass through, and without a store all errors. Ranks that wait are
    informed of these and of a normal end. A rank whose launcher or store is gone also ends, so that
    a run that is started again meets no old ranks.
    """

    def __init__(self, mesh: ProcessMesh) -> None:
        self.mesh = mesh
        self._store: Any = None
        if mesh.store is not None:
            # A client of its own: calls of one client wait for each other, and the main thread may
            # be in one that does not return.
            self._store = PrefixStore("watch", mesh.store.clone())  # type: ignore[attr-defined]
        self._failure: tuple[Report, int] | None = None
        self._closed = False
        self._lost = False
        self._silent_s = 0.0
        self._old: dict[int, Any] = {}
        self._noted: float | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.settimeout(POLL_S)
        if threading.current_thread() is threading.main_thread():
            # Python's handlers run in the main thread, which may be in a call that never returns.
            # So the interpreter writes each signal's number to a socket, and the thread reads it.
            self._wakeup = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, _ignore)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        lost = error is not None and is_lost(error)
        ours = error is not None and (lost or not isinstance(error, UserError | SystemExit))
        if ours and self.mesh.store is not None:
            cause = None
            if not lost:
                # In one line: an error of NCCL has several.
                cause = " ".join(f"{type(error).__name__}: {error}".split())
                with suppress(OSError):
                    traceback.print_exception(error)
            report = report_of(self.mesh, short(str(error)), cause)
            self._failure = report, LOST if lost else FAULT
            self._bell.send(b"\0")
            self._thread.join()  # does not return: the thread ends the process
        limit_s = self.mesh.position.limit_s or ANSWER_S
        if error is not None:
            limit_s = ANSWER_S
            self._post(report_of(self.mesh, "", f"{type(error).__name__}: {error}"))
        self.mesh.position.leave()
        self._take_leave(limit_s)
        self._close()

    def _take_leave(self, limit_s: float) -> None:
        """Count this rank as one that has left the run. If it hosts the store, wait for the others.

        If the host left first, the others would think that the run had failed.

        `limit_s` is the longest wait, in seconds.
        """
        left = self._ask(lambda store: store.add("left", 1))
        until = time.monotonic() + limit_s
        of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        keeps = self.mesh.world.rank == 0 and not of_launcher
        while keeps and left and left < self.mesh.world.size and time.monotonic() < until:
            time.sleep(PAUSE_S)
            left = self._ask(lambda store: store.add("left", 0))

    def _close(self) -> None:
        if self._old:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._old.items():
                # Another handler than ours: the run was asked to stop, and ignores repetitions.
                if signal.getsignal(number) is _ignore:
                    signal.signal(number, handler)
        self._closed = True
        self._bell.send(b"\0")
        self._thread.join()
        self._bell.close()
        self._ear.close()

    def _run(self) -> None:
        """Check this rank every POLL_S seconds, and at once after an error or a signal."""
        said = ""
        while not self._closed:
            try:
                heard = self._ear.recv(64)
            except TimeoutError:
                heard = b"\0"
            try:
                self._look(heard)
            except Exception as error:
                # The thread goes on: without it nothing would end a hang.
                text = f"{type(error).__name__}: {error}"
                if text != said:
                    rank = self.mesh.world.rank
                    _say(f"the watch over rank {rank} met an error of its own and goes on: {text}")
                said = text

    def _look(self, heard: bytes) -> None:
        """End the process if there is a reason; Ctrl-C and this rank's own error come first.

        `heard` has one byte for each signal that came: the signal's number.
        """
        if self._closed:
            return
        # A thread that is late reads several at once.
        if any(self._interrupted() for _ in range(heard.count(signal.SIGINT))):
            self._post(report_of(self.mesh, "", "interrupted (Ctrl-C)"))
            self._leave("interrupted", signal.SIGINT)
        if self._failure:
            self._end(*self._failure)
        if self._alone():
            self._end(report_of(self.mesh, "this rank ends"), LOST)
        # A handler of the run's own saves and ends the run in its own time.
        if signal.SIGTERM in heard and signal.getsignal(signal.SIGTERM) is _ignore:
            self._terminated()
        if self._too_long():
            self._end(report_of(self.mesh, "timed out"), STUCK)
        if self._others_failed():
            self._end(report_of(self.mesh, "another rank failed"), LOST)

    def _interrupted(self) -> bool:
        """Return whether this Ctrl-C ends the run.

        If the first Ctrl-C makes the run save, only a second Ctrl-C ends it. Torchrun sends each
        Ctrl-C on to its ranks, so under it a signal within RELAY_S seconds of the first does not
        count as a second. Another handler of the run's own ends the run itself.
        """
        handler = signal.getsignal(signal.SIGINT)
        if not getattr(handler, "first_saves", False):
            return handler is _ignore
        now = time.monotonic()
        first = self._noted
        if first is None:
            self._noted = now
            return False
        relay_s = 0.0 if LAUNCHER is None else RELAY_S
        return now - first > relay_s

    def _alone(self) -> str | None:
        """Return why no other rank can be reached any more; None if some can."""
        if LAUNCHER is not None and os.getppid() != LAUNCHER:
            return "its launcher has ended"
        if self._lost:
            return "the process or machine that keeps the ranks' store (by hand: rank 0) is gone"
        return None

    def _too_long(self) -> bool:
        position = self.mesh.position
        if position.at is None or position.limit_s is None:
            return False
        return time.monotonic() - position.at[1] > position.limit_s + GRACE_S

    def _others_failed(self) -> bool:
        return bool(self._ask(lambda store: store.check(["failed"])))

    def _leave(self, why: str, number: int) -> NoReturn:
        """Exit with 128 + `number`, the number of a signal.

        One rank of each machine prints `why`.
        """
        if os.environ.get("LOCAL_RANK", "0") == "0":
            position = self.mesh.position
            where = "in" if position.at or position.plan is None else "after"
            _say(f"{why} {where} {position.step}; any checkpoint saved before is complete")
        _exit(128 + number)

    def _terminated(self) -> NoReturn:
        """Exit with 143 after SIGTERM; unless all ranks received it, report first, as in a failure.

        If only some received it, another rank has failed: torchrun sent SIGTERM to the others.
        """
        report = report_of(self.mesh, TERMINATED)
        size = self.mesh.world.size
        until = time.monotonic() + ANSWER_S
        asked = self._ask(lambda store: store.add("terminated", 1)) or 1
        while asked < size and time.monotonic() < until and not self._others_failed():
            time.sleep(PAUSE_S)
            asked = self._ask(lambda store: store.add("terminated", 0)) or 1
        if asked == size:
            self._leave(TERMINATED, signal.SIGTERM)
        self._end(report, 128 + signal.SIGTERM)

    def _end(self, report: Report, code: int) -> NoReturn:
        """Print this rank's report and exit. The first rank to fail also prints the first mismatch.

        `code` is the exit code of the process. It is LOST if no other rank can be reached.
        """
        try:
            self._tell(report)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            _say(f"{report}; the other ranks could not be heard: {reason}")
        _exit(code)

    def _tell(self, report: Report) -> None:
        self._post(report)
        # Nobody else can be heard, so there is no mismatch to name.
        if why := self._alone():
            _say(f"{report}; {why}; any checkpoint saved before is complete")
            _exit(LOST)
        _say(str(report))
        # The first rank to fail names the mismatch. The others wait until that is said: when one
        # process ends, the launcher may end the first one before it has spoken.
        world = self.mesh.world
        first = self._ask(lambda store: store.add("failed", 1)) == 1
        if first:
            reports = {world.rank: report} | self._collect()
            _say(f"first mismatch: {first_mismatch(reports, world.size)}")
            self._ask(lambda store: store.set("named", "yes"))
        else:
            limit = timedelta(seconds=ANSWER_S)
            self._ask(lambda store: store.wait(["named"], limit), ANSWER_S + 1)
        if world.rank == 0:
            # Started by hand, this process keeps the store, which others are still reading.
            time.sleep(POLL_S)

    def _collect(self) -> dict[int, Report]:
        """Return {global rank: its report} for reports that were posted within ANSWER_S seconds."""
        ranks: set[int] = set()
        size = self.mesh.world.size
        until = time.monotonic() + ANSWER_S
        while len(ranks) < size and self._store is not None and time.monotonic() < until:
            time.sleep(PAUSE_S)
            posted = self._ask(lambda store: store.get("reported")) or b""
            ranks = set(map(int, posted.split()))
        # One request for all of them. When every rank asked for every other, 1,024 ranks made two
        # million requests.
        keys = [f"rank{rank}" for rank in ranks]
        texts = self._ask(lambda store: store.multi_get(keys)) or ()
        return {rank: Report.from_json(text) for rank, text in zip(ranks, texts, strict=False)}

    def _post(self, report: Report) -> None:
        """Put a report in the store, then this rank's number in the list that `_collect` reads."""
        rank = self.mesh.world.rank
        text = report.to_json()

        def post(store: Any) -> None:
            store.set(f"rank{rank}", text)
            store.append("reported", f"{rank} ")

        self._ask(post)

    def _ask(self, call: Callable[[Any], T], limit_s: float = 2.0) -> T | None:
        """Return call(store); None if there is no answer in `limit_s` seconds, or no such key.

        After a lost connection, or SILENCE_S seconds without answers, it is not asked again.
        """
        answer: list[T] = []

        def ask() -> None:
            try:
                answer.append(call(self._store))
            except DistStoreError:
                pass  # the key that it waited for did not come
            except RuntimeError:
                self._give_up()

        if self._store is None:
            return None
        # A thread for each call: a call to a store whose process is stopped does not return.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(limit_s)
        if asking.is_alive():
            self._silent_s += limit_s
        else:
            self._silent_s = 0.0
        if self._silent_s > SILENCE_S:
            self._give_up()
        return answer[0] if answer else None

    def _give_up(self) -> None:
        self._store = None
        self._lost = True


def _ignore(*_: object) -> None:
    """Do nothing, as a signal handler; the watch receives the signal's number separately."""


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads it
        os.write(2, f"megapipe: {text}\n".encode())  # in one piece: other ranks write too


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    os._exit(code)
