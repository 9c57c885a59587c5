"""How a model is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread: tensor, context, pipeline and data parallel."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers among them."""
    context_parallel_size: int = 1
    """Ranks that share each sequence: of 2c pieces rank r has the r-th and the r-th from the end."""
    use_tp_pp_dp_mapping: bool = False
    """Number ranks along tensor, then pipeline, then data parallel, instead of pipeline last."""
    pipeline_schedule: str | None = None
    """Order of the passes: a name, .json or .csv file, or FILE.py:NAME. Default: 1f1b; interleaved for many stages."""
    pipeline_costs: str | None = None
    """A .json of what passes and messages take, as tools/plan.py --save-costs writes it. Default: by FLOPs."""
    reschedule_after: int | None = None
    """Time the passes of iterations 2 to N, search a better order for them beside the run, and go on under it."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of each stage, where a rank holds several."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Stages of each rank: the same by count."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Microbatches that pass one chunk of a rank before the next begins, under interleaved. Default: pipeline ranks."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline rank, over all its stages; the others share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline rank."""
    account_for_embedding_in_pipeline_split: bool = False
    """The embedding counts as a layer where stages are made even."""
    account_for_loss_in_pipeline_split: bool = False
    """The output head and loss count as a layer where stages are made even."""
    pipeline_model_parallel_layout: str | None = None
    """Megatron's string of E (embedding), t (layer) and L (loss); or auto: the split of least simulated time."""
    vocab_parallel_pipeline: bool = False
    """Each pipeline rank has an equal share of embedding and output head, in passes of their own (E, S, C, T, EW)."""
    memory_limit_gib: float | None = None
    """Most memory that a rank may be predicted to need, for parameters, optimizer and activations."""
    use_distributed_optimizer: bool = False
    """Split main parameters and Adam's moments of a stage over data parallel (ZeRO-1). Same bits."""
    overlap_grad_reduce: bool = False
    """Reduce the gradients of a stage while others still compute, as passes G of the table."""
    ddp_bucket_size: int | None = None
    """Gradient elements that are reduced at once, while a stage's last weight pass does the layers before. Default:
    all of a stage, behind it."""
    ddp_num_buckets: int | None = None
    """The same as a number of buckets per stage."""
    overlap_param_gather: bool = False
    """Gather the updated weights of a stage at the start of the next step, as passes A of the table."""
    enable_optimizer_post_validation: bool = False
    """Update before the norm is known, passes U; V in the next step undoes a wrong guess. Same bits, no barrier."""
    post_validation_after: int = 10
    """Steps in a row that were neither clipped nor skipped, after which no update waits for the norm."""
    no_overlap_p2p_communication: bool = False
    """Post messages between stages in batches instead of one by one."""
    use_ring_exchange_p2p: bool = False
    """Post messages between stages as ring exchanges, each complete as a unit; wins over the flag before."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl with a GPU, gloo without."""
    distributed_timeout_minutes: float = 10.0
    """How long a collective or message may take before the run is stopped."""
    distributed_timeout_seconds_after_init: float | None = None
    """The same from the second iteration on. Default: --distributed-timeout-minutes."""

    @property
    def ranks_of_a_replica(self) -> int:
        """Ranks that see the same samples."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    @property
    def p2p_mode(self) -> Literal["plain", "batched", "ring"]:
        """How messages between stages are posted, see pipeline_parallel.transport."""
        if self.use_ring_exchange_p2p:
            return "ring"
        return "batched" if self.no_overlap_p2p_communication else "plain"

    @property
    def of_optimizer(self) -> dict[str, Any]:
        """What optim.optimizer takes of it."""
        buckets = {"bucket_size": self.ddp_bucket_size, "num_buckets": self.ddp_num_buckets}
        return {
            "distributed": self.use_distributed_optimizer,
            "gathers_later": self.overlap_param_gather,
            **(buckets if self.overlap_grad_reduce else {}),
        }
