"""Two tables of what ranks ask for: where the host waits for its device, and what a way of posting
messages costs.
"""

from __future__ import annotations

import json

from megapipe.pipeline_parallel.messages.transport import P2PMode
from megapipe.schedule import Costs, simulate, unpaired
from megapipe.schedule.passes import Schedule
from megapipe.schedule.patterns import PATTERNS
from tools.proofs.gpu.orders import COPIES, DEPTH, EXPERTS, PAIRS, SLICES, VALIDATION, ZERO
from tools.proofs.gpu.passes import built, records_of
from tools.proofs.gpu.rules import play
from tools.proofs.gpu.steps import host_waits, started_kernels

PP = "--pipeline-model-parallel-size 2 --num-layers 4 --pipeline-schedule "
EP = "--expert-model-parallel-size 2 " + EXPERTS
FIXED = (
    "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity "
    "--moe-router-load-balancing-type none "
)
SMALL, LARGE = "1f1b --global-batch-size 4 ", "zb-h1 --global-batch-size 8 "
GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 1 "
WAITS = {
    "1F1B, 2 microbatches": SMALL,
    "ZB-H1, 4 microbatches": LARGE + ZERO,
    "a depth of multi-token prediction": SMALL + DEPTH,
    "2 slices of each microbatch": LARGE + SLICES,
    "activations copied to the host": LARGE + COPIES,
    "a shared vocabulary": SMALL + "--vocab-parallel-pipeline ",
    "experts that are all here": SMALL + "--num-experts 4 --moe-router-topk 2 ",
    "experts here and there, 2 microbatches of 2 layers": SMALL + EP,
    "the same in pairs, 4 microbatches": "dualpipe --global-batch-size 8 " + EP + PAIRS,
    "experts of fixed capacity": SMALL + EP + FIXED,
    "CUDA graphs, captured in the step": LARGE + GRAPHS,
    "post-validation, and the time of the line that is logged": LARGE + VALIDATION + ZERO,
}
"""Flags of runs of four ranks, by what they are."""


def waits() -> None:
    """Print how many times the host of a pipeline's busiest rank waits in a step, as JSON."""
    print(
        json.dumps({name: host_waits(PP + flags, 4) for name, flags in WAITS.items()}), flush=True
    )


STAGE = (
    "--pipeline-schedule zb-h1 --global-batch-size 4 --num-layers 8 --swiglu "
    "--normalization RMSNorm "
)


def launches() -> None:
    """Print the launches of a host in a step of 4 microbatches of 8 layers, without graphs and with
    them, as JSON.
    """
    print(json.dumps([started_kernels(STAGE + given) for given in ("", GRAPHS)]), flush=True)


MESSAGE = 0.05
"""Time of a message, in passes F = B = W = 1."""


def modes() -> None:
    """Print steps at pp 8 with 32 microbatches over the simulator's, and blocks of kernels that
    wait next to passes.
    """
    print(
        f"{'':20}{'':>10}"
        + "".join(f"{mode:>12}" for mode in P2PMode)
        + "   (step / simulated, waiting blocks)"
    )
    for name, entry in PATTERNS.items():
        if not entry.searched:
            for table in built(name, 8, 32):
                paired = any(len(step) > 1 for row in table.ranks for step in row)
                for one, how in (
                    ((table, "paired"), (unpaired(table), "")) if paired else ((table, ""),)
                ):
                    print(
                        f"{name:20}{how:>10}"
                        + "".join(f"{_cell(one, mode):>12}" for mode in P2PMode),
                        flush=True,
                    )


def _cell(table: Schedule, mode: str) -> str:
    costs = Costs(f=1.0, b=1.0, w=1.0, comm=MESSAGE)
    played = play(records_of(table, mode, costs=costs), message=MESSAGE)
    return f"{played.seconds / simulate(table, costs).makespan:.3f} {played.idle_ctas:4.1f}"
