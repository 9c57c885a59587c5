"""Record and judge the calls of GPU code, on a CUDA device that does not exist: `python -m
tools.proofs.gpu [COMMANDS]`.

roofline (or nothing): the time of a step on an H100 by its kernels, see roofline.py; --json: as
JSON.
orders: does any order of messages hang over NCCL, see orders.py.
waits: how often the host waits for its device in a step.
pairs: what pairs of passes hide of experts' all-to-alls, see pairs.py.
launches: what a host launches in a step without CUDA graphs and with them.
modes: how long steps take by the three ways to post messages.
"""

from __future__ import annotations

import sys

from tools.proofs.gpu import fake_cuda


def main() -> None:
    fake_cuda.load()
    from tools.proofs.gpu import (
        orders,
        pairs,
        roofline,
        tables,
    )  # they import torch, which asks for its devices then

    asked = sys.argv[1:]
    if "waits" in asked:
        tables.waits()
    if "launches" in asked:
        tables.launches()
    if "modes" in asked:
        tables.modes()
    if "pairs" in asked:
        pairs.main()
    others = {"waits", "launches", "modes", "pairs", "orders"}
    status = 0
    if "orders" in asked:
        status = orders.main(asked)
    # The last: it changes how torch moves parameters.
    if "roofline" in asked or not others & set(asked):
        roofline.main("--json" in asked)
    sys.exit(status)


if __name__ == "__main__":
    main()
