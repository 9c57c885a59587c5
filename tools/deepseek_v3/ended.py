"""The end of a run by its --metrics-file: losses, time, bubble, and the load of each expert.

python -m tools.deepseek_v3.ended runs/deepseek-v3/metrics.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megapipe.errors import DataError
from megapipe.flags.stop import say

Row = Mapping[str, Any]


def main(argv: Sequence[str]) -> None:
    say("\n".join(report(rows_of(Path(argv[0])))))


def rows_of(path: Path) -> list[Row]:
    """All steps of a --metrics-file. Raises: DataError if there are none."""
    rows = (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    )
    if not rows:
        raise DataError(f"{path} has no steps: megapipe pretrain --metrics-file writes them")
    return rows


def report(rows: Sequence[Row]) -> Iterator[str]:
    """The lines. rows: of all steps."""
    first, last = rows[0], rows[-1]
    for name, loss in last["losses"].items():
        yield (
            f"{name}: {first['losses'].get(name, loss):.4f} in step {first['iteration']}, "
            f"{loss:.4f} in step " + str(last["iteration"])
        )
    rate = _median(rows, "tokens_per_second")
    yield f"step: {_median(rows, 'step_ms'):.0f} ms, {rate:.0f} tokens/s (medians)"
    if any("bubble" in row for row in rows):
        parts = {
            name: median(row["bubble_parts"][name] for row in rows if "bubble" in row)
            for name in _parts(rows)
        }
        said = ", ".join(f"{name} {share:.1%}" for name, share in parts.items())
        yield (
            f"bubble: predicted {_median(rows, 'predicted_bubble'):.1%}, measured "
            f"{_median(rows, 'bubble'):.1%} "
            f"({said}); medians"
        )
    exposed = "exposed_communication", "predicted_exposed_communication"
    if shares := [
        _median(rows, key) for key in exposed if any(row.get(key) is not None for row in rows)
    ]:
        said = ", predicted ".join(f"{share:.1%} of the passes" for share in shares)
        yield f"communication that nothing ran beside: {said}; medians"
    tokens = last.get("tokens_per_expert") or {}
    if tokens:
        yield f"tokens of each expert in step {last['iteration']}, and the busiest one's in means:"
    for layer, counts in tokens.items():
        busiest = max(counts) * len(counts) / sum(counts)
        yield f"  layer {layer:>2}: {' '.join(f'{n:5d}' for n in counts)}   {busiest:.2f}"


def _parts(rows: Sequence[Row]) -> list[str]:
    return [*next(row["bubble_parts"] for row in rows if "bubble" in row)]


def _median(rows: Sequence[Row], key: str) -> float:
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return median(values)


if __name__ == "__main__":
    main(sys.argv[1:])
