"""Code in Megatron's shape that makes one mesh after the other in the same processes."""

import torch

from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.parallel_state import destroy_model_parallel, initialize_model_parallel

for size in (1, 2, 1):
    initialize_model_parallel(pipeline_model_parallel_size=size)
    mesh = ProcessMesh.required()
    print(f"{mesh.pp.size} stages, sum {mesh.world.all_reduce(torch.ones(1)).item():g}", flush=True)
    del mesh
    destroy_model_parallel()
