"""Cases where a better schedule than any fixed pattern is known to exist, and how far the search gets."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).parents[2]))  # a fresh clone runs it before anything is installed

from megapipe.schedule.costs import Costs
from megapipe.schedule.search.auto import search

# Placement, chunks, p, m, (F, B, W), memory; makespan of the best peer, and the best that minutes of annealing found.
_KNOWN = (
    ("v", 2, 4, 8, (10.0, 14.0, 7.0), 3, 298.0, 290.5),
    ("v", 2, 4, 8, (10.0, 14.0, 7.0), 2, 375.0, 345.5),
    ("v", 2, 8, 16, (10.0, 14.0, 7.0), 6, 608.0, 589.5),
    ("v", 2, 8, 16, (10.0, 14.0, 7.0), 5, 641.0, 622.5),
    ("v", 2, 8, 16, (10.0, 14.0, 7.0), 4, 758.0, 695.0),
    ("v", 2, 8, 16, (10.0, 11.0, 8.0), 4, 631.0, 613.0),
    ("loop", 2, 8, 16, (10.0, 11.0, 8.0), 8, 509.5, 502.5),
    ("loop", 2, 4, 8, (10.0, 14.0, 7.0), 4, 273.5, 270.0),
)


def main() -> None:
    """Print how far the search gets from the best peer to the best known schedule. Takes minutes."""
    parser = ArgumentParser(description=main.__doc__)
    parser.add_argument("--effort", type=float, default=40.0, help="about the seconds for each line (default: 40)")
    effort = parser.parse_args().effort
    print(f"{'placement':9} {'p':>2} {'m':>3} {'F/B/W':>8} {'memory':>6}", end=" ")
    print(f"{'peer':>6} {'ours':>6} {'known':>6} {'bound':>6} {'closed':>6} {'seconds':>7}")
    for place, chunks, p, m, (f, b, w), memory, peer, known in _KNOWN:
        began = process_time()
        ours = search(p, m, placement=place, chunks=chunks, costs=Costs(f, b, w), memory=memory, effort=effort)
        seconds, closed = process_time() - began, (peer - ours.makespan) / (peer - known)
        print(f"{place + ' ' + str(chunks):9} {p:2} {m:3} {f'{f:g}/{b:g}/{w:g}':>8} {memory:6}", end=" ")
        print(f"{peer:6} {ours.makespan:6} {known:6} {ours.bound:6} {closed:6.0%} {seconds:7.1f}", flush=True)


if __name__ == "__main__":
    main()
