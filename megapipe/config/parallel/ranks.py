"""The sizes of the axes that a model is split over, and the notes that depend on them."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Annotated

from megapipe.config.model.moe import EXPERTS
from megapipe.config.notes import LISTED, Idle, demands, needs

SEVERAL_RANKS = needs("pipeline_model_parallel_size", "there is one pipeline rank", least=2)
REPLICAS = Idle(
    lambda c: c.weight_replicas <= 1,
    "there is one copy of the weights, without several data- or context-parallel ranks",
)


@dataclass(frozen=True)
class RanksConfig:
    """Sizes of tensor, context, pipeline and expert parallelism. The rest is data parallel."""

    tensor_model_parallel_size: Annotated[int, LISTED] = 1
    """Number of ranks that split each layer's matrices."""
    pipeline_model_parallel_size: Annotated[int, LISTED] = 1
    """Number of ranks that split the layers among them."""
    context_parallel_size: Annotated[int, LISTED] = 1
    """Number of ranks c that split each sequence. It is cut in 2c pieces; rank r has the r-th
    piece from the start and the r-th from the end."""
    expert_model_parallel_size: Annotated[
        int,
        LISTED,
        demands(
            "num_experts",
            says="{} shares experts, and there are none. Give --num-experts, or leave it out.",
        ),
    ] = 1
    """Number of ranks that split the experts of each layer among them. These ranks come from the
    data-, context- and tensor-parallel ones."""
    expert_tensor_parallel_size: Annotated[int | None, LISTED, EXPERTS] = None
    """Number of ranks that split each expert's matrices. Default:
    --tensor-model-parallel-size."""
    use_tp_pp_dp_mapping: Annotated[bool, SEVERAL_RANKS] = False
    """Number the ranks along tensor, then pipeline, then data parallel. Default: along pipeline
    parallel last."""

    @property
    def hides(self) -> bool:
        """Return whether layers have collectives, which can be hidden by the compute of a pass."""
        dense = self.tensor_model_parallel_size * self.context_parallel_size
        return dense * self.expert_model_parallel_size > 1

    @property
    def etp(self) -> int:
        """Number of ranks that split an expert's matrices."""
        # Megatron-LM's default, too.
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def ranks_of_a_replica(self) -> int:
        """Number of ranks that train on the same samples: tensor x context x pipeline."""
        tensor_and_context = self.tensor_model_parallel_size * self.context_parallel_size
        return tensor_and_context * self.pipeline_model_parallel_size

    @property
    def least_ranks(self) -> int:
        """The smallest possible number of ranks; every possible number is a multiple.

        This is the least common multiple of tensor x context x pipeline (one replica) and expert x
        expert tensor x pipeline (all experts once).
        """
        experts = self.expert_model_parallel_size * self.etp
        return lcm(self.ranks_of_a_replica, experts * self.pipeline_model_parallel_size)
