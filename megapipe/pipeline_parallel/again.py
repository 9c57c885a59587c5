"""Read the items of an iterator a second time, for passes that run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class Rewinding(Iterator[T]):
    """An iterator over a stage's data that can be set back to its first item.

    `rewind` sets it back. This is needed if V, the pass that validates the last update, finds the
    update wrong: the step then begins again.

    Args:
        at: takes an index and returns the item of that index.
        order: the indices, in the order in which their items are given.
    """

    # A function and not the items: a batch is made when it is taken, and none is kept here.
    def __init__(self, at: Callable[[int], T], order: Sequence[int]) -> None:
        self._at = at
        self._order = order
        self._taken = 0

    def __next__(self) -> T:
        if self._taken == len(self._order):
            raise StopIteration
        self._taken += 1
        return self._at(self._order[self._taken - 1])

    def rewind(self) -> None:
        """Set the iterator back: the first item is the next one again."""
        self._taken = 0


class Noting(Iterator[T]):
    """An iterator that keeps the items it has returned, so that a forward can be run again.

    Pass R, which recomputes a forward before its backward, needs the same items.

    Attributes:
        given: the items returned so far, in order.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self.given: list[T] = []

    def __next__(self) -> T:
        self.given.append(next(self._items))
        return self.given[-1]
