"""Compare two plans of a search by cause, in seconds."""

from __future__ import annotations

from collections.abc import Mapping

from megapipe.commands.plan.search.report import UserPlan
from megapipe.commands.plan.search.taken import YOURS, Advice
from megapipe.errors import ConfigError
from megapipe.plan.seconds.step import TimedPlan

TAKE = "take"
"""The word of --why for the plan to take."""


def why(
    names: tuple[str, ...],
    best: list[TimedPlan],
    yours: UserPlan,
    advice: Advice | None,
) -> str:
    """Return a table of the seconds of two plans by cause, and their differences.

    Args:
        names: two plans: numbers from 1 in `best`, or "yours" or "take".
        best: the plans of the report.
        yours: the plan of the user's own flags, or why they have none.
        advice: has the plan to take; None without plans.
    Raises: ConfigError for a name that is no plan of the list.
    """
    known: Mapping[str, TimedPlan | None] = {
        **{str(n): x for n, x in enumerate(best, 1)},
        YOURS: yours.plan,
        TAKE: advice.plan if advice else None,
    }
    problems = [_problem(name, best, yours) for name in names if known.get(name) is None]
    if problems:
        raise ConfigError(problems)
    a, b = (known[name] for name in names)
    assert a is not None
    assert b is not None
    rows = [("seconds of a step", *names, "difference")]
    causes = {"model": a.step - sum(a.parts.values())} | a.parts
    others = {"model": b.step - sum(b.parts.values())} | b.parts
    for cause, seconds in causes.items():
        other = others[cause]
        rows.append((cause, f"{seconds:z.4f}", f"{other:z.4f}", f"{other - seconds:+z.4f}"))
    rows.append(("all", f"{a.step:.4f}", f"{b.step:.4f}", f"{b.step - a.step:+.4f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    )


def _problem(name: str, best: list[TimedPlan], yours: UserPlan) -> str:
    """Return why a name of --why has no plan.

    Args:
        best: the plans of the report.
        yours: the plan of the user's own flags, or why they have none.
    """
    if name == YOURS:
        reason = "they name no layout"
        if yours.refused:
            reason = "a run refuses them"
        return f"--why {YOURS}: your flags have no plan, as {reason}."
    known = "no numbers"
    if best:
        known = f"1 to {len(best)}"
    if yours.plan is not None:
        known += f", and {YOURS}"
    return f"--why {name} is no plan of the list: it has {known}."
