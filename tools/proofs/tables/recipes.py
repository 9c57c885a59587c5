"""Is a run's table the one that `schedules show` draws of the run's recipe?

    python -m tools.proofs.tables.recipes --draw 500

Flags of runs are drawn with up to three features. Each run has its table, and the table of a batch
half as large, which a batch that grows begins with. The recipe of each is printed as a line and
given to `show` with the plan's costs; both tables must be equal, pass by pass. Searched orders are
left out, as `show` searches longer than a run does.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

from megapipe.commands import schedules
from megapipe.config import Config
from megapipe.errors import UserError
from megapipe.plan import Plan, whole_step, with_batch
from megapipe.schedule.costs_file import dump_costs
from megapipe.schedule.recipe_line import to_line
from megapipe.schedule.text import load
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


def main() -> int:
    """Draw runs and compare. Returns 1 if a table differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", type=int, default=500, help="runs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice, counts = Random(options.seed), Counter[str]()
    while counts["runs"] < options.draw:
        line = drawn_run(dice)
        try:
            config, plan = planned(line)
        except (UserError, SystemExit):
            continue
        counts["runs"] += 1
        found = [different(config, plan)]
        if half := config.num_microbatches // 2:
            smaller = config.with_batch(
                half * (config.global_batch_size or 1) // config.num_microbatches
            )
            with contextlib.suppress(UserError):
                found.append(different(smaller, with_batch(plan, smaller)))
        counts["tables"] += len(found)
        for text in filter(None, found):
            counts["different"] += 1
            print(line, text, sep="\n", flush=True)
    print(f"{counts['runs']} runs, {counts['tables']} tables, {counts['different']} different")
    return int(counts["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
