"""Run a module as a rank on an emulated device: what megapipe gpu-check --emulated starts.

    torchrun --nproc-per-node 2 -m tools.proofs.gpu.emulated.program megapipe pretrain <flags>

Exit status 1 if a GPU would have refused something, with the faults.
"""

from __future__ import annotations

import runpy
import sys

from tools.proofs.gpu.emulated.launch import world


def main() -> int:
    del sys.argv[0]
    with world() as lib:
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code not in (0, None):
                raise
        faults = lib.faults()
    for fault in faults[:5]:
        print(f"Error on an emulated device: {fault}", file=sys.stderr, flush=True)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
