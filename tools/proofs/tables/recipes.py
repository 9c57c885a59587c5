"""Is a run's table the one that `schedules show` draws of the run's recipe?

    python -m tools.proofs.tables.recipes --cases 500

Flags of runs are drawn with up to three features. Each run has its table, and the table of a batch
half as large, which a batch that grows begins with. The recipe of each is printed as a line and
given to `show` with the plan's costs; both tables must be equal, pass by pass. Searched orders are
left out, as `show` searches longer than a run does.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from megapipe.commands import schedules
from megapipe.config import Config
from megapipe.errors import UserError
from megapipe.flags.parse import parse, run
from megapipe.plan import Plan, whole_step, with_batch
from megapipe.schedule.costs_file import dump_costs
from megapipe.schedule.recipe_line import to_line
from megapipe.schedule.text import load
from tools.proofs.shrink import Draws, Fuzzer
from tools.proofs.tables.digests import drawn_run, hashed, planned


def different(config: Config, plan: Plan) -> str | None:
    """Return how the table that `show` makes differs from the plan's; None if it does not."""
    assert plan.recipe is not None
    if plan.recipe.search is not None:
        return None
    own = hashed(whole_step(plan.schedule, config, plan.costs))
    with tempfile.TemporaryDirectory() as folder:
        costs, file = Path(folder) / "costs.json", Path(folder) / "table.json"
        costs.write_text(dump_costs(plan.costs))
        line = [*shlex.split(to_line(plan.recipe)), "--costs", str(costs)]
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                schedules.main(["show", *line, "--json", str(file)])
        except (UserError, SystemExit) as error:
            return f"show {to_line(plan.recipe)}\n  is refused: {error} {said.getvalue()}"
        shown = hashed(load(file))
    return None if shown == own else f"show {to_line(plan.recipe)}\n  makes {shown}, the run {own}"


def draw(dice: Random) -> str | None:
    """A run's line of flags; None if it is refused."""
    line = drawn_run(dice)
    try:
        planned(line)
    except (UserError, SystemExit):
        return None
    return line


def differences(line: str) -> list[str]:
    """Compare the run's table, and that of half its batch."""
    config, plan = planned(line)
    found = [different(config, plan)]
    if half := config.num_microbatches // 2:
        size = half * (config.global_batch_size or 1) // config.num_microbatches
        smaller = config.with_batch(size)
        with contextlib.suppress(UserError):
            found.append(different(smaller, with_batch(plan, smaller)))
    return [text for text in found if text]


@dataclass(frozen=True)
class Flags(Draws):
    """Compare the tables of drawn runs with those that `schedules show` makes of their recipes."""

    cases: float = 500
    """Number of runs."""


def main(argv: Sequence[str]) -> None:
    """Draw runs and compare."""
    fuzzer = Fuzzer("recipes", draw, differences)
    fuzzer.prove(parse(Flags, argv))
    print(f"{fuzzer.count} runs: their tables, and those of half their batch, are the recipes'")


if __name__ == "__main__":
    run(main)
