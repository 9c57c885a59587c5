"""Read what the user wants to see of all plans: --fix, --among and --without of `megapipe plan`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.plan.seconds.page import recomputes
from megapipe.plan.seconds.step import TimedPlan, layout_of
from megapipe.plan.split import schedule_name
from megapipe.schedule import SCHEDULES
from megapipe.schedule.catalogue import PLAIN

NUMBERS = ("tp", "cp", "pp", "micro", "ep", "etp")
"""Axes with numbers, in the order of a layout."""
WORDS = {
    "schedule": tuple(SCHEDULES),
    "recompute": ("none", "selective", "full"),
    "sharding": ("yes", "no"),
}
"""Axes with words, and these words. sharding: of weights and gradients, as --use-megatron-fsdp."""
AXES = (*NUMBERS, *WORDS)
VOCABULARY = "vocabulary"
"""The word of --without for a vocabulary that all pipeline ranks share."""
PARTS = ("sharding", "moves", "pipeline", "recompute", "hiding", VOCABULARY)
"""What --without leaves out, apart from schedules; moves are activations offloaded or recomputed
one by one, and hiding hides communication, see `hiding`."""
_MOST = 100_000


@dataclass(frozen=True)
class SearchRestrictions:
    """The restrictions of a search by --fix, --among and --without.

    An axis is a property that the search chooses, such as tp, pp or schedule.

    `allows` and `allows_schedule` say whether a plan respects the restrictions, and `schedules`
    which of some schedules do. `numbers` returns the values that an axis may have.

    Attributes:
        among: {axis: allowed values}, such as {"tp": {"2", "4"}}. An axis that is not a key may
            have any value.
        without: the words of --without: names of schedules, and words of PARTS such as "recompute".
        chunks: stages on each rank, under a schedule that leaves a choice; None for any number.
    """

    among: Mapping[str, frozenset[str]] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    chunks: int | None = None

    def allows(self, **chosen: object) -> bool:
        """Return whether a plan may have these values, for example `allows(tp=2, sharding=True)`.

        Args:
            chosen: the value of each axis that the plan has chosen.
        """
        if "sharding" in self.without and chosen.get("sharding"):
            return False
        if "pipeline" in self.without and _word(chosen.get("pp", 1)) != "1":
            return False
        if "recompute" in self.without and chosen.get("recompute"):
            return False
        return all(
            _word(value) in self.among[axis] for axis, value in chosen.items() if axis in self.among
        )

    def numbers(self, axis: str) -> list[int]:
        """Return the allowed values of an axis such as tp; an empty list if all are allowed."""
        return sorted(map(int, self.among.get(axis, ())))

    def allows_schedule(self, name: str) -> bool:
        """Return whether a plan may have the schedule of this name.

        Without "hiding" it may have no schedule whose own table pairs passes.
        """
        if "hiding" in self.without and SCHEDULES[name].pairs:
            return False
        return name not in self.without and self.allows(schedule=name)

    def schedules(self, listed: Iterable[tuple[str, int | None]]) -> list[tuple[str, int | None]]:
        """Return those schedules that a plan may have, with its number of stages on each rank.

        Args:
            listed: (schedule, stages on each rank, or None if the schedule prescribes them).
        """
        found = [(name, chunks) for name, chunks in listed if self.allows_schedule(name)]
        if self.chunks is not None:
            found = [(name, chunks and self.chunks) for name, chunks in found]
        return list(dict.fromkeys(found))


ANYTHING = SearchRestrictions()


def _word(value: object) -> str:
    """Return a value as --among spells it: yes or no for a bool, none for None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def asked_of(
    fix: tuple[str, ...], among: tuple[str, ...], without: tuple[str, ...], own: Config
) -> SearchRestrictions:
    """Return the restrictions by --fix, --among and --without.

    Args:
        fix: axes, such as tp, that keep the value of the user's own flags.
        among: texts such as "tp=2,4" or "pp=1..8".
        without: names of schedules and parts to leave out.
        own: the configuration of the user's flags, for --fix.
    Raises: ConfigError with every problem.
    """
    problems = [
        f"--fix {axis} is no axis of a search. Give some of {', '.join(AXES)}."
        for axis in fix
        if axis not in AXES
    ]
    known = {*SCHEDULES, *PARTS}
    problems += [
        f"--without {word} is neither a schedule (megapipe schedules list) nor one of "
        f"{', '.join(PARTS)}."
        for word in without
        if word not in known
    ]
    chosen: dict[str, frozenset[str]] = {}
    for text in among:
        axis, equals, values = text.partition("=")
        if axis not in AXES or not equals:
            problems.append(
                f"--among {text} must be AXIS=VALUES, such as tp=2,4 or pp=1..8, with one of "
                f"{', '.join(AXES)}."
            )
            continue
        allowed = frozenset(_values(axis, values))
        if None in allowed:
            legal = ", ".join(WORDS.get(axis, ("numbers such as 2,4 or 1..8",)))
            problems.append(f"--among {text}: {axis} may have {legal}.")
            continue
        values_of_axis = frozenset(x for x in allowed if x is not None)
        chosen[axis] = chosen.get(axis, frozenset()) | values_of_axis
    twice = [axis for axis in fix if axis in chosen]
    problems += [f"--fix {axis} and --among {axis}=... exclude each other." for axis in twice]
    if problems:
        raise ConfigError(problems)
    mine = own_values(own)
    chosen |= {axis: frozenset([mine[axis]]) for axis in fix}
    return SearchRestrictions(chosen, frozenset(without))


def own_values(own: Config) -> dict[str, str]:
    """Return {axis, such as tp or schedule: its value in the user's own flags}."""
    # A run without --micro-batch-size has no layout yet; one sequence stands for it.
    whole = own.with_fields(micro_batch_size=own.batch.micro_batch_size or 1)
    found = {axis: str(x) for axis, x in zip(NUMBERS, layout_of(whole), strict=True)}
    found["schedule"] = own_schedule(own)
    found["recompute"] = _word(recomputes(own.model))
    found["sharding"] = _word(own.parallel.shards_grads)
    return found


def own_schedule(own: Config) -> str:
    """Return the schedule of the user's flags, such as interleaved for several stages on a rank."""
    try:
        return schedule_name(own)
    except ConfigError:
        # The flags do not give each rank a whole number of stages, which another check reports.
        return PLAIN


def allows_change(asked: SearchRestrictions, own: Config, changed: Config) -> bool:
    """Return whether the restrictions of a search allow a change of the user's plan.

    Axes that do not change keep the user's values, whatever the restrictions say of them.

    Args:
        own: the configuration of the user's plan.
        changed: this configuration with one flag changed.
    """
    before = own_values(own)
    values = own_values(changed)
    return _allows_values(asked, {axis: x for axis, x in values.items() if x != before[axis]})


def allows_plan(asked: SearchRestrictions, x: TimedPlan) -> bool:
    """Return whether a search with these restrictions could have found a plan."""
    if "moves" in asked.without and x.moves:
        return False
    if VOCABULARY in asked.without and x.config.parallel.vocab_parallel_pipeline:
        return False
    return _allows_values(asked, own_values(x.config))


def _allows_values(asked: SearchRestrictions, values: Mapping[str, str]) -> bool:
    """Return whether a plan may have these values of axes, in the words of `own_values`."""
    chosen: dict[str, Any] = {**values}
    if "sharding" in chosen:
        chosen["sharding"] = chosen["sharding"] == "yes"
    if chosen.get("recompute") == "none":
        chosen["recompute"] = None
    name = chosen.get("schedule")
    return asked.allows(**chosen) and (name not in SCHEDULES or asked.allows_schedule(name))


def _values(axis: str, text: str) -> Iterator[str | None]:
    """Yield the values that a text such as "2,4" or "1..8" lists; None for an impossible value.

    Args:
        axis: name of the choice, such as "tp" or "schedule", which decides what values are
            possible.
        text: the text.
    """
    for part in text.split(","):
        if axis in WORDS:
            yield part if part in WORDS[axis] else None
            continue
        first, dots, last = part.partition("..")
        ends = (first, last) if dots else (first, first)
        if not all(end.isascii() and end.isdigit() and len(end) <= 6 for end in ends):
            yield None
            continue
        low, high = map(int, ends)
        if not 1 <= low <= high <= _MOST:
            yield None
            continue
        yield from map(str, range(low, high + 1))


def joined(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the command line with each of these flags once, at its last place, with all values.

    Args:
        argv: flags and values.
        names: flags with lists of values.
    """
    values: dict[str, list[str]] = {}
    kept: list[str] = []
    into = kept
    for word in argv:
        name, equals, value = word.partition("=")
        if name in names:
            # The flag moves to the end of the line.
            into = values.setdefault(name, [])
            into += [value] * bool(equals)
        else:
            if word.startswith("--"):
                into = kept
            into.append(word)
    for name in names:
        # A flag without values stays too, for the error about it.
        if name in values:
            kept += [name, *values[name]]
    return kept
