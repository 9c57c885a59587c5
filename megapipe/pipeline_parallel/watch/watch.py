"""Ends a run that cannot go on: says where every rank stands and which one holds up the others, then exits.

A thread beside the main one, which may be stuck in a call that never returns. The ranks tell each other over the
launcher's store, which needs none of the broken groups. Exit codes are in docs/troubleshooting.md.
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

from torch.distributed import DistError, DistStoreError, PrefixStore  # type: ignore[attr-defined]

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import UserError
from megapipe.pipeline_parallel.watch.diagnosis import TERMINATED, Report, first_mismatch, report_of

T = TypeVar("T")

FAULT, LOST, STUCK = 1, 3, 4
"""Exit codes: an error of this rank's own; a message or collective failed; a call did not return in time."""

LAUNCHER = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
"""The process of torchrun; a rank that was started by hand may outlive its shell."""

POLL_S = 1.0
ANSWER_S = 3.0
"""Seconds that the other ranks have to say where they are."""
SILENCE_S = 20.0
"""Seconds that the ranks' store may owe answers before it counts as gone.

A process that ends closes its connections, which is heard at once: silent are a stopped one and a machine that is cut
off. A healthy store was 16 s late where 100 programs shared two cores.
"""
RELAY_S = 5.0
"""Seconds after a Ctrl-C, which a terminal sends to every process, in which torchrun may still pass it on."""
GRACE_S = 1.0
"""Seconds that a call may take beyond the timeout before it counts as one that never returns."""


class Watch:
    """Watches over one rank while it is entered; `with Watch(mesh): train()`.

    A message or collective that fails or takes longer than the timeout, an error, a rank gone: each rank prints one
    line, one of them the first mismatch, and the process ends with a code of its own. Ctrl-C ends it with 130. An
    error for the user passes through, and other ranks that wait for this one are told of it; so does a normal end. A
    rank whose launcher or store is gone ends too: started again, the run would meet it.
    """

    def __init__(self, mesh: ProcessMesh) -> None:
        self.mesh = mesh
        self._store: Any = None
        if mesh.store is not None:  # a client of its own: calls of one client wait for each other
            self._store = PrefixStore("watch", mesh.store.clone())  # type: ignore[attr-defined]
        self._failure: tuple[Report, int] | None = None
        self._closed, self._lost, self._silent_s = False, False, 0.0
        self._old: dict[int, Any] = {}
        self._noted: float | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.settimeout(POLL_S)
        if threading.current_thread() is threading.main_thread():
            # A signal's number goes straight to the thread: the main one may be where Python handlers wait for ever.
            self._wakeup = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, _ignore)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        lost = error is not None and is_lost(error)
        ours = error is not None and (lost or not isinstance(error, UserError | SystemExit))
        if ours and self.mesh.store is not None:
            if not lost:
                with suppress(OSError):
                    traceback.print_exception(error)
            cause = None if lost else f"{type(error).__name__}: {error}"
            self._failure = report_of(self.mesh, _short(str(error)), cause), LOST if lost else FAULT
            self._bell.send(b"\0")
            self._thread.join()  # does not return: the thread ends the process
        if error is not None:
            self._post(report_of(self.mesh, "", f"{type(error).__name__}: {error}"))
        self.mesh.position.leave()
        self._take_leave(ANSWER_S if error is not None else self.mesh.position.limit_s or ANSWER_S)
        self._close()

    def _take_leave(self, limit_s: float) -> None:
        """The rank that keeps the store is the last: the others would take the run for one that broke off."""
        left, until = self._ask(lambda store: store.add("left", 1)), time.monotonic() + limit_s
        keeps = self.mesh.world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        while keeps and left and left < self.mesh.world.size and time.monotonic() < until:
            time.sleep(0.05)
            left = self._ask(lambda store: store.add("left", 0))

    def _close(self) -> None:
        if self._old:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._old.items():
                if signal.getsignal(number) is _ignore:  # else the run has been told to stop and ignores repeats
                    signal.signal(number, handler)
        self._closed = True
        self._bell.send(b"\0")
        self._thread.join()
        self._bell.close()
        self._ear.close()

    def _run(self) -> None:
        said = ""
        while not self._closed:
            try:
                heard = self._ear.recv(64)
            except TimeoutError:
                heard = b"\0"
            try:
                self._look(heard)
            except Exception as error:  # it goes on: without it nothing would end a hang
                if said != (said := f"{type(error).__name__}: {error}"):
                    _say(f"the watch over rank {self.mesh.world.rank} met an error of its own and goes on: {said}")

    def _look(self, heard: bytes) -> None:
        if not self._closed:
            if signal.SIGINT in heard and self._interrupted():
                self._post(report_of(self.mesh, "", "interrupted (Ctrl-C)"))
                self._leave("interrupted", signal.SIGINT)
            if self._failure:
                self._end(*self._failure)
            if self._alone():
                self._end(report_of(self.mesh, "this rank ends"), LOST)
            if signal.SIGTERM in heard and signal.getsignal(signal.SIGTERM) is _ignore:
                self._terminated()
            if self._too_long():
                self._end(report_of(self.mesh, "timed out"), STUCK)
            if self._others_failed():
                self._end(report_of(self.mesh, "another rank failed"), LOST)

    def _interrupted(self) -> bool:
        """Does this Ctrl-C end the run? A first one that saves does not, nor the same as torchrun passes it on."""
        handler, now = signal.getsignal(signal.SIGINT), time.monotonic()
        if getattr(handler, "first_saves", False):
            first, self._noted = self._noted, self._noted or now
            return first is not None and now - first > (0.0 if LAUNCHER is None else RELAY_S)
        return handler is _ignore

    def _alone(self) -> str | None:
        """The reason why no other rank can be heard any more, and no new one will be started beside this one."""
        if LAUNCHER is not None and os.getppid() != LAUNCHER:
            return "its launcher has ended"
        return "the process or machine that keeps the ranks' store (by hand: rank 0) is gone" if self._lost else None

    def _too_long(self) -> bool:
        position = self.mesh.position
        if position.at is None or position.limit_s is None:
            return False
        return time.monotonic() - position.at[1] > position.limit_s + GRACE_S

    def _others_failed(self) -> bool:
        return bool(self._ask(lambda store: store.check(["failed"])))

    def _leave(self, why: str, number: int) -> NoReturn:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            position = self.mesh.position
            where = "in" if position.at or position.plan is None else "after"
            _say(f"{why} {where} {position.step}; any checkpoint saved before is complete")
        _exit(128 + number)

    def _terminated(self) -> NoReturn:
        """All ranks are to stop, and nothing is wrong; or the launcher ends those that outlived another."""
        report, size, until = report_of(self.mesh, TERMINATED), self.mesh.world.size, time.monotonic() + ANSWER_S
        # A signal to all is no failure, but one to this rank alone is: torchrun ends so what outlives a failed rank.
        told = self._ask(lambda store: store.add("terminated", 1)) or 1
        while told < size and time.monotonic() < until and not self._others_failed():
            time.sleep(0.05)
            told = self._ask(lambda store: store.add("terminated", 0)) or 1
        if told == size:
            self._leave(TERMINATED, signal.SIGTERM)
        self._end(report, 128 + signal.SIGTERM)

    def _end(self, report: Report, code: int) -> NoReturn:
        """Say where this rank is, hear the others, name the first mismatch, exit."""
        try:
            self._tell(report)
        except Exception as error:
            _say(f"{report}; the other ranks could not be heard: {type(error).__name__}: {error}")
        _exit(code)

    def _tell(self, report: Report) -> None:
        self._post(report)
        if why := self._alone():
            _say(f"{report}; {why}; any checkpoint saved before is complete")
            _exit(LOST)
        _say(str(report))
        # The first to fail names the mismatch; the others wait until that is said, lest the launcher ends it
        # meanwhile.
        first = self._ask(lambda store: store.add("failed", 1)) == 1
        reports = {self.mesh.world.rank: report} | (self._collect() if first else {})
        if first:
            _say(f"first mismatch: {first_mismatch(reports, self.mesh.world.size)}")
            self._ask(lambda store: store.set("named", "yes"))
        else:
            self._ask(lambda store: store.wait(["named"], timedelta(seconds=ANSWER_S)), ANSWER_S + 1)
        if self.mesh.world.rank == 0:
            time.sleep(POLL_S)  # by hand it keeps the store, which others are still reading

    def _collect(self) -> dict[int, Report]:
        """Reports that the ranks, this one among them, post until all have or the time is over, in one request."""
        ranks: set[int] = set()
        until = time.monotonic() + ANSWER_S
        while len(ranks) < self.mesh.world.size and self._store is not None and time.monotonic() < until:
            time.sleep(0.05)
            ranks = set(map(int, (self._ask(lambda store: store.get("reported")) or b"").split()))
        texts = self._ask(lambda store: store.multi_get([f"rank{rank}" for rank in ranks])) or ()
        return {rank: Report.from_json(text) for rank, text in zip(ranks, texts, strict=False)}

    def _post(self, report: Report) -> None:
        """Post a report for `_collect`, which asks for those of all ranks in one list."""
        rank, text = self.mesh.world.rank, report.to_json()

        def post(store: Any) -> None:
            store.set(f"rank{rank}", text)
            store.append("reported", f"{rank} ")

        self._ask(post)

    def _ask(self, call: Callable[[Any], T], limit_s: float = 2.0) -> T | None:
        """The store's answer; None without one. When it is gone it is not asked again."""
        answer: list[T] = []

        def ask() -> None:
            try:
                answer.append(call(self._store))
            except DistStoreError:
                pass  # what was waited for did not come
            except RuntimeError:
                self._store, self._lost = None, True

        if self._store is None:
            return None
        # A thread for each: a call to a store whose process is stopped does not return.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(limit_s)
        self._silent_s = self._silent_s + limit_s if asking.is_alive() else 0.0
        if self._silent_s > SILENCE_S:
            self._store, self._lost = None, True
        return answer[0] if answer else None


def _ignore(*_: object) -> None:
    """The watch hears the signal by its number."""


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads it
        os.write(2, f"megapipe: {text}\n".encode())  # in one piece: other ranks write too


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    os._exit(code)


def is_lost(error: BaseException) -> bool:
    """Return whether a message or collective has failed, which another rank may have caused."""
    gloos = any(part in str(error) for part in ("gloo", _CLOSED))
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and gloos)


_CLOSED = "Application timeout caused pair closure"
"""Gloo's words to all that wait for a rank after the first of them has timed out: the only ones without its name."""


def _short(text: str) -> str:
    """Gloo's and NCCL's page in two words."""
    known = {
        "Timed out": "timed out",
        _CLOSED: "timed out",
        "Connection closed": "connection closed",
        "reset by peer": "connection lost",
    }
    return next((words for part, words in known.items() if part in text), text.split("\n")[0][:200])
