"""What the code of a GPU does, on a CUDA device that is not there: `python -m tools.proofs.gpu [COMMAND]`.

roofline (or nothing): the time of a step on an H100 by its kernels, see roofline.py.
orders: does any order of messages hang over NCCL, see orders.py.
waits: how often the host waits for its device in a step.
modes: how long steps take by the three ways to post messages.
"""

from __future__ import annotations

import sys

from tools.proofs.gpu import fake_cuda


def main() -> None:
    fake_cuda.load()
    fake_cuda.move_parameters()
    from tools.proofs.gpu import orders, roofline, tables  # they import torch, which asks for its devices then

    if sys.argv[1:2] == ["orders"]:
        orders.main(sys.argv[2:])
    elif sys.argv[1:2] == ["waits"]:
        tables.waits()
    elif sys.argv[1:2] == ["modes"]:
        tables.modes()
    else:
        roofline.main("--json" in sys.argv)


if __name__ == "__main__":
    main()
