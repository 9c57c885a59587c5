"""The spread of a model over ranks. A group of settings is a file here.

A new setting goes to the file of its subject. A new subject is a file and one of the bases of
`ParallelConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import CLOCK, FROM_1, Idle
from megapipe.config.parallel.offload import OffloadConfig
from megapipe.config.parallel.pipeline import PipelineConfig
from megapipe.config.parallel.ranks import SEVERAL_RANKS, RanksConfig
from megapipe.config.parallel.sharding import ShardingConfig


# A dataclass lists the fields of its last base first: --help and the log follow this order.
@dataclass(frozen=True)
class ParallelConfig(OffloadConfig, ShardingConfig, PipelineConfig, RanksConfig):
    """Settings of tensor, context, pipeline and data parallelism."""

    # Messages between stages.
    # One by one, a late message holds up only messages of its own neighbour and direction, see
    # distributed.groups.num_links.
    no_overlap_p2p_communication: Annotated[
        bool,
        SEVERAL_RANKS,
        Idle(
            lambda c: c.parallel.use_ring_exchange_p2p,
            "messages go as ring exchanges, with --use-ring-exchange-p2p",
        ),
    ] = False
    """Post messages between stages in batches. Default: one by one."""
    use_ring_exchange_p2p: Annotated[bool, SEVERAL_RANKS] = False
    """Post messages between stages as ring exchanges; each completes as a unit. This wins over
    --no-overlap-p2p-communication."""
    # CUDA graphs.
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    """Capture each stage's forward and backward as CUDA graphs. All names but none do the same. A
    line in the log says where nothing is captured, and why."""
    cuda_graph_warmup_steps: Annotated[
        int,
        FROM_1,
        Idle(
            lambda c: c.parallel.cuda_graph_impl == "none",
            "nothing is captured, without --cuda-graph-impl",
        ),
    ] = 3
    """Number of steps before the capture, in which the inputs of passes are recorded."""
    # Process groups.
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Library for collectives and messages. auto: nccl with a GPU, gloo without."""
    distributed_timeout_minutes: Annotated[float, CLOCK] = 10.0
    """Minutes that a collective or message may take before the run is stopped."""
    distributed_timeout_seconds_after_init: Annotated[float | None, CLOCK] = None
    """Seconds that it may take from the second iteration on. Default:
    --distributed-timeout-minutes."""

    @property
    def p2p_mode(self) -> Literal["plain", "batched", "ring"]:
        """The way in which sends and receives between stages are posted.

        plain: each by itself. batched: those posted at one time together. ring: all pipeline ranks
        at a time, each with both neighbours.
        """
        if self.use_ring_exchange_p2p:
            return "ring"
        return "batched" if self.no_overlap_p2p_communication else "plain"
