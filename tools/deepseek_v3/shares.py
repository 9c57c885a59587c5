"""A share of communication in the costs of passes, from the steps of a run whose passes run alone:
all of it is waited for there.

python -m tools.deepseek_v3.shares runs/deepseek-v3/alone.jsonl runs/deepseek-v3/costs.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from megapipe.data.files import write_complete
from megapipe.errors import DataError
from megapipe.flags.stop import say
from megapipe.schedule.costs_file import dump_costs, load_costs
from tools.deepseek_v3.ended import Row, rows_of


def main(argv: Sequence[str]) -> None:
    """Write the costs again with the share. argv: a --metrics-file, costs as megapipe plan
    --save-costs writes them.
    """
    rows = [row for row in rows_of(Path(argv[0])) if row.get("exposed_communication") is not None]
    if not rows:
        raise DataError(
            f"{argv[0]} tells of no communication in passes: train some steps with experts over "
            "ranks"
        )
    costs = load_costs(argv[1])
    share = median(map(_of_busy, rows))
    f, b, w = (sum(x) if isinstance(x, tuple) else x for x in (costs.f, costs.b, costs.w))
    part = min(share * (f + b + w) / (f + b), 0.99)  # weight gradients have none
    write_complete(argv[1], dump_costs(replace(costs, link_f=part, link_b=part)))
    say(f"communication is {share:.1%} of what passes take, {part:.1%} of F and of B: {argv[1]}")


def _of_busy(row: Row) -> float:
    """The waits for collectives as a share of a rank's passes without its waits for messages."""
    busy = mean(rank["busy"] for rank in row["ranks_ms"])
    return float(row["exposed_communication"] * row["passes_ms"] / busy)


if __name__ == "__main__":
    main(sys.argv[1:])
