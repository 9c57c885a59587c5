"""Iterators whose items are read a second time, by passes that run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class Rewinding(Iterator[T]):
    """An iterator that can begin again, for passes that run again.

    Args:
        at, order: its items are at(i) for each i of the order.
    """

    def __init__(self, at: Callable[[int], T], order: Sequence[int]) -> None:
        self._at, self._order, self._taken = at, order, 0

    def __next__(self) -> T:
        if self._taken == len(self._order):
            raise StopIteration
        self._taken += 1
        return self._at(self._order[self._taken - 1])

    def rewind(self) -> None:
        """The next item is the first."""
        self._taken = 0


class Noting(Iterator[T]):
    """An iterator that notes what it gives."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items, self.given = items, list[T]()

    def __next__(self) -> T:
        self.given.append(next(self._items))
        return self.given[-1]
