"""What ranks do in a world that the caller made, as Megatron-LM's scripts do it; for `rank_pool.Pool`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megapipe.config import ParallelConfig
from megapipe.distributed import parallel_state as ps
from megapipe.distributed.axis import CPU
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError

GROUPS = {
    "tp": ps.get_tensor_model_parallel_group,
    "pp": ps.get_pipeline_model_parallel_group,
    "cp": ps.get_context_parallel_group,
    "dp": ps.get_data_parallel_group,
    "dp-cp": lambda: ps.get_data_parallel_group(with_context_parallel=True),
    "tp-pp": ps.get_model_parallel_group,
    "tp-cp": ps.get_tensor_and_context_parallel_group,
    "tp-dp": ps.get_tensor_and_data_parallel_group,
    "tp-dp-cp": lambda: ps.get_tensor_and_data_parallel_group(with_context_parallel=True),
}


def answers(tp, pp, cp, order):
    """Of one rank: ranks of every group, as torch knows them and as a sum over the group says; and other answers."""
    ps.initialize_model_parallel(tp, pp, 2, context_parallel_size=cp, order=order)
    found = {}
    for name, group in GROUPS.items():
        seen = torch.zeros(dist.get_world_size(), dtype=torch.int)
        seen[dist.get_rank()] = 1
        dist.all_reduce(seen, group=group())
        ranks = dist.get_process_group_ranks(group())
        assert ranks == seen.nonzero().flatten().tolist()
        found[name] = ranks, group().rank()
    said = {
        "ranks": {
            "tp": (ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()),
            "pp": (ps.get_pipeline_model_parallel_rank(), ps.get_pipeline_model_parallel_world_size()),
            "cp": (ps.get_context_parallel_rank(), ps.get_context_parallel_world_size()),
            "dp": (ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()),
            "dp-cp": (ps.get_data_parallel_rank(True), ps.get_data_parallel_world_size(True)),
            "tp-cp": (ps.get_tensor_and_context_parallel_rank(), ps.get_tensor_and_context_parallel_world_size()),
        },
        "firsts": {
            "tp": ps.get_tensor_model_parallel_src_rank(),
            "pp": ps.get_pipeline_model_parallel_first_rank(),
            "dp": ps.get_data_parallel_src_rank(),
            "dp-cp": ps.get_data_parallel_src_rank(with_context_parallel=True),
            "tp-pp": ps.get_model_parallel_src_rank(),
        },
        "neighbours": (ps.get_pipeline_model_parallel_prev_rank(), ps.get_pipeline_model_parallel_next_rank()),
        "last": ps.get_pipeline_model_parallel_last_rank(),
        "first stage": [ps.is_pipeline_first_stage(False, chunk) for chunk in (0, 1)],
        "last stage": [ps.is_pipeline_last_stage(False, chunk) for chunk in (0, 1)],
        "embeds": (ps.is_rank_in_embedding_group(), ps.get_embedding_group(False) is not None),
        "positions": (ps.is_rank_in_position_embedding_group(), ps.get_position_embedding_group(False) is not None),
    }
    ps.set_virtual_pipeline_model_parallel_rank(1)
    said["chunk"] = ps.get_virtual_pipeline_model_parallel_rank(), ps.get_virtual_pipeline_model_parallel_world_size()
    collection = ps.ProcessGroupCollection.use_mpu_process_groups()
    assert (collection.tp, collection.mp, collection.dp_cp) == (
        ps.get_tensor_model_parallel_group(),
        ps.get_model_parallel_group(),
        ps.get_data_parallel_group(with_context_parallel=True),
    )
    ps.destroy_model_parallel()
    assert not ps.model_parallel_is_initialized()
    dist.barrier()  # the world is the caller's, and stays
    return found, said


def expert_answers(tp, ep, etp):
    """Ranks of a rank's expert groups, as a sum over each says."""
    ps.initialize_model_parallel(tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    groups = {
        "ep": ps.get_expert_model_parallel_group(),
        "etp": ps.get_expert_tensor_parallel_group(),
        "edp": ps.get_expert_data_parallel_group(),
        "both": ps.get_expert_tensor_and_model_parallel_group(),
    }
    found = {}
    for name, group in groups.items():
        seen = torch.zeros(dist.get_world_size(), dtype=torch.int)
        seen[dist.get_rank()] = 1
        dist.all_reduce(seen, group=group)
        found[name] = seen.nonzero().flatten().tolist()
    sizes = ps.get_expert_model_parallel_world_size(), ps.get_expert_tensor_parallel_world_size()
    assert sizes == (len(found["ep"]), len(found["etp"]))
    assert ps.get_expert_data_parallel_rank() == found["edp"].index(dist.get_rank())
    ps.destroy_model_parallel()
    return found


def refusal(tp, pp, own_size=False):
    """What a rank is told. own_size: each rank asks for another tensor-parallel size."""
    tp = 1 + dist.get_rank() % 2 if own_size else tp
    try:
        ProcessMesh.create(ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp), CPU)
    except ConfigError as error:
        return str(error)
    return None
