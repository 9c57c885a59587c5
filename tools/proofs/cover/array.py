"""A covering array: few cases in which every legal combination of two or three choices occurs.

Rows are made greedily, one after the other: a combination that no row has yet is fixed, each other
choice takes the value that brings most new combinations, and what the checks of a launch refuse is
changed until they accept the row.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

Row = dict[str, str]
Problems = Callable[[Row, Row], Sequence[str]]
Named = Callable[[str], set[str]]
Pair = tuple[str, str]
"""A choice and one of its values."""


class Array:
    """Rows that cover combinations of values, and the combinations that the checks refuse.

    Args:
        choices: the values of each choice, the usual one first.
        problems: each (row, the values in it that are fixed) -> the sentences that refuse the row;
            none for a legal one. Where the first finds no legal row for a combination, the next is
            asked: it allows more.
        named: the choices that a sentence names.
        seed: of the draws.
    Attributes:
        rows: legal cases.
        refused: combinations of which no legal case was found, with the sentence that refuses it.
    """

    def __init__(
        self,
        choices: Mapping[str, Iterable[str]],
        problems: Sequence[Problems],
        named: Named,
        seed: int = 0,
    ) -> None:
        self.choices = {name: list(values) for name, values in choices.items()}
        self.problems = tuple(problems)
        self.named = named
        self.rows: list[Row] = []
        self.refused: dict[tuple[Pair, ...], str] = {}
        self._said = Counter[str]()
        self._dice = random.Random(seed)
        self._plain = {name: values[0] for name, values in self.choices.items()}
        self._items = [(name, value) for name, values in self.choices.items() for value in values]
        self._number = {item: n for n, item in enumerate(self._items)}
        size = len(self._items)
        self._excluded = np.zeros((size, size), bool)

    def take(self, rows: Sequence[Row], refused: Mapping[tuple[Pair, ...], str]) -> None:
        """Begin with rows and refused pairs of an earlier array of the same choices, or of some of
        them.

        Rows that the checks refuse by now are left out. Refused combinations of three values are
        asked again.
        """
        last = self.problems[-1]
        self.rows += [row for row in rows if not last(row, row)]
        for pair, why in refused.items():
            if len(pair) == 2:
                self.refused[pair] = why
                a, b = (self._number[item] for item in pair)
                self._excluded[a, b] = self._excluded[b, a] = True

    def extend(self, strength: int, say: Callable[[str], None] = lambda text: None) -> None:
        """Add rows until every legal combination of `strength` choices is in one of them, pairs
        first.

        Args:
            strength: 2 or 3.
            say: called with a line now and then.
        """
        for size in range(2, strength + 1):
            self._extend(size, say)

    def _extend(self, strength: int, say: Callable[[str], None]) -> None:
        missing = self._missing(strength)
        for row in self.rows:
            self._strike(missing, row, strength)
        total = int(missing.sum())
        while len(found := np.argwhere(missing)):
            fixed = [self._items[n] for n in found[self._dice.randrange(len(found))]]
            if (made := self._row(fixed, missing)) is None:
                self.refused[tuple(sorted(fixed))] = self._why()
                self._exclude(fixed, missing)
                continue
            self.rows.append(made)
            self._strike(missing, made, strength)
            if len(self.rows) % 20 == 0:
                say(f"{len(self.rows)} cases, {int(missing.sum())} of {total} combinations left")

    def legal(self, strength: int) -> int:
        """Return how many combinations of `strength` choices the rows have."""
        covered = ~self._missing(strength)
        before = int(covered.sum())
        for row in self.rows:
            self._strike(missing := ~covered, row, strength)
            covered = ~missing
        return int(covered.sum()) - before

    def _missing(self, strength: int) -> np.ndarray:
        """Return an array by the numbers of items in ascending order: True for each combination of
        several choices.
        """
        size = len(self._items)
        choice = np.array([list(self.choices).index(name) for name, _ in self._items])
        ascending = choice[:, None] < choice[None, :]
        pairs = ascending & ~self._excluded
        if strength == 2:
            return pairs
        missing = pairs[:, :, None] & pairs[None, :, :]
        missing &= (~self._excluded)[:, None, :]
        assert missing.shape == (size, size, size)
        return missing

    def _strike(self, missing: np.ndarray, row: Row, strength: int) -> None:
        numbers = [self._number[item] for item in row.items()]
        missing[np.ix_(*[sorted(numbers)] * strength)] = False

    def _exclude(self, fixed: Sequence[Pair], missing: np.ndarray) -> None:
        numbers = sorted(self._number[item] for item in fixed)
        missing[tuple(numbers)] = False
        if len(fixed) == 2:
            a, b = numbers
            self._excluded[a, b] = self._excluded[b, a] = True

    def _row(self, fixed: Sequence[Pair], missing: np.ndarray) -> Row | None:
        """Return a legal row with these values, rich in missing combinations; None if none is
        found.
        """
        for problems in self.problems:
            self._said.clear()
            for attempt in range(3):
                row = self._greedy(fixed, missing) if attempt < 2 else self._plain | dict(fixed)
                for _ in range(4 if attempt == 2 else 1):
                    if (legal := self._repaired(row, dict(fixed), problems)) is not None:
                        return legal
        return None

    def _greedy(self, fixed: Sequence[Pair], missing: np.ndarray) -> Row:
        row = dict(fixed)
        names = [name for name in self.choices if name not in row]
        self._dice.shuffle(names)
        taken = [self._number[item] for item in fixed]
        for name in names:
            values = list(self.choices[name])
            self._dice.shuffle(values)
            numbers = [self._number[name, value] for value in values]
            gains = [self._gain(number, taken, missing) for number in numbers]
            best = max(range(len(values)), key=gains.__getitem__)
            row[name] = values[best]
            taken.append(numbers[best])
        return row

    def _gain(self, number: int, taken: list[int], missing: np.ndarray) -> int:
        """Return how many missing combinations a value has with those taken; below 0 where one
        excludes it.
        """
        if self._excluded[number, taken].any():
            return -1
        if missing.ndim == 2:
            return int(missing[number, taken].sum() + missing[taken, number].sum())
        rows = np.array(sorted(taken))
        below, above = rows[rows < number], rows[rows > number]
        return int(
            missing[number][np.ix_(above, above)].sum()
            + missing[:, number][np.ix_(below, above)].sum()
            + missing[:, :, number][np.ix_(below, below)].sum()
        )

    def _repaired(self, row: Row, fixed: Row, ask: Problems) -> Row | None:
        """Change the choices that refusals of a row name, except fixed ones, until none is left."""
        row = dict(row)
        for attempt in range(40):
            problems = ask(row, fixed)
            if not problems:
                return row
            self._said.update(problems)
            named = sorted(set().union(*map(self.named, problems)) - fixed.keys())
            changed = [name for name in named if row[name] != self._plain[name]]
            if attempt < 25 and changed and self._dice.random() < 0.6:
                name = self._dice.choice(changed)
                row[name] = self._plain[name]
            else:
                name = self._dice.choice(named or [name for name in row if name not in fixed])
                row[name] = self._dice.choice(self.choices[name])
        return None

    def _why(self) -> str:
        """Return the sentence that was said most often while a legal row was looked for."""
        return self._said.most_common(1)[0][0]
