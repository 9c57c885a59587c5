"""Other work while a collective is under way: what DualPipe's overlapped pair needs to hide communication."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from torch import Tensor

from megapipe.distributed.axis import Pending

_work: ContextVar[Callable[[], None] | None] = ContextVar("meanwhile", default=None)


def meanwhile(work: Callable[[], None] | None) -> None:
    """Let layers call `work` when they would only wait, in the rest of the running contextvars context."""
    _work.set(work)


def result_of(pending: Pending) -> Tensor:
    """The result of a collective that has been started, after some of the other work."""
    work = _work.get()
    if work is not None and pending.work is not None:
        work()
    return pending.wait()
