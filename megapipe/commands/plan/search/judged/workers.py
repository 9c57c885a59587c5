"""Processes that judge plans side by side, one for each core."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Self, TypeVar

from megapipe.errors import ConfigError

Question = TypeVar("Question")
Answer = TypeVar("Answer")
_BLOCKS = 4
"""Blocks of questions for each process."""
_PATIENCE = 2.0
"""Seconds without an answer after which `tell` is called again."""


class Workers:
    """Processes that all have a copy of `state`; `ask` calls a function in them for many questions.

    With jobs = 1 there is no further process, and the calling process answers. Use the object in a
    `with` statement, which ends the processes.

    Args:
        state: the first argument of every function that is asked.
        jobs: the number of processes.
    """

    def __init__(self, state: Any, jobs: int) -> None:
        self._state = state
        self._ends: list[Connection] = []
        self._children: list[Any] = []
        if jobs < 2:
            return
        # A fork has the state without a copy and without another start of Python.
        context = multiprocessing.get_context("fork")
        for _ in range(jobs):
            mine, theirs = context.Pipe()
            self._ends.append(mine)
            child = context.Process(
                target=_serve, args=(theirs, state, tuple(self._ends)), daemon=True
            )
            child.start()
            theirs.close()
            self._children.append(child)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A process that is in the middle of an answer, as after ctrl-C, is not waited for. It has
        # nothing to tidy up, and a parent that ignores SIGTERM has children that ignore it too.
        for child in self._children:
            child.kill()
        for child in self._children:
            child.join()

    def ask(
        self,
        answer: Callable[[Any, Question], Answer],
        questions: Sequence[Question],
        size: int | None = None,
        tell: Callable[[int], None] = lambda done: None,
        take: Callable[[int, Answer], None] = lambda number, answer: None,
    ) -> list[Answer]:
        """Return the answers to all questions, in their order.

        Args:
            answer: called with (the state that the processes began with, a question). `answer` must
                be a module-level function, so that it can be pickled.
            size: number of questions that a process gets at once. None for a quarter of its share.
            tell: called with the number of answers so far, whenever there are more, and every
                few seconds while there are none.
            take: called with (index of a question, its answer) as soon as there is one, for a
                caller that may not wait for all.
        """
        if not self._ends:
            alone = []
            for question in questions:
                alone.append(answer(self._state, question))
                take(len(alone) - 1, alone[-1])
                tell(len(alone))
            return alone
        # Questions next to each other often share a cell's plan, so they are asked in blocks. Some
        # take a hundred times as long as others: a process that is done gets the next block.
        if size is None:
            size = max(1, -(-len(questions) // (_BLOCKS * len(self._ends))))
        blocks = [questions[n : n + size] for n in range(0, len(questions), size)]
        waiting = [*enumerate(blocks)][::-1]
        asked: dict[Connection, int] = {}
        found: list[list[Answer]] = [[] for _ in blocks]
        idle = [*self._ends]
        while waiting or asked:
            while idle and waiting:
                number, block = waiting.pop()
                end = idle.pop()
                end.send((answer, block))
                asked[end] = number
            for ready in wait([*asked], _PATIENCE):
                assert isinstance(ready, Connection)
                number = asked.pop(ready)
                try:
                    found[number] = ready.recv()
                except EOFError:
                    raise ConfigError(
                        "a process of --search was killed, perhaps for want of memory. "
                        "Try --search-jobs 1."
                    ) from None
                for n, one in enumerate(found[number]):
                    take(number * size + n, one)
                idle.append(ready)
            tell(sum(map(len, found)))
        return [one for block in found for one in block]


def _serve(end: Connection, state: Any, parents: Sequence[Connection]) -> None:
    """Call functions that the parent process asks for, and send the results, until the parent ends.

    Args:
        end: the pipe from which questions come and to which answers go.
        state: the first argument of every function.
        parents: the parent's ends of all pipes so far, which the fork has copied; closed here.
    """
    # Ctrl-C reaches all processes of a terminal; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What the parent has, such as groups of gloo with their threads, is not this process's to end:
    # the threads are not here, and a collection that frees such a group hangs or aborts.
    gc.freeze()
    # With a copy left open, this process would not see that a killed parent is gone.
    for copy in parents:
        copy.close()
    while True:
        try:
            answer, block = end.recv()
            end.send([answer(state, question) for question in block])
        except (EOFError, BrokenPipeError):
            return
