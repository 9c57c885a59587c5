"""Other work while a collective is under way: what DualPipe's overlapped pair needs to hide communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from megapipe.mesh import Pending

_work: ContextVar[Callable[[], None] | None] = ContextVar("meanwhile", default=None)


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Layers that run in this context call `work` when they would only wait."""
    token = _work.set(work)
    try:
        yield
    finally:
        _work.reset(token)


def wait(pending: Pending) -> Tensor:
    """The result of a collective that has been started, after some of the other work."""
    work = _work.get()
    if work is not None and pending.work is not None:
        work()
    return pending.wait()
