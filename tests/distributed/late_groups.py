"""A mesh of two ranks, the second of which has its groups a second after the first."""

import sys
import time
from pathlib import Path

import torch.distributed as dist

from megapipe.distributed import mesh
from megapipe.distributed.parallel_state import destroy_model_parallel, initialize_model_parallel

made, usual = Path(sys.argv[1]), mesh.build_mesh


def late(grids, rank, *given):
    found = usual(grids, rank, *given)
    if rank == 1:
        time.sleep(1)
        made.touch()
    return found


mesh.build_mesh = late
if "guest" in sys.argv:
    dist.init_process_group("gloo")
initialize_model_parallel(pipeline_model_parallel_size=2)
print(f"all groups are made: {made.exists()}", flush=True)
destroy_model_parallel()
