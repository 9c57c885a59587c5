"""Data parallelism: what of a stage is sharded, and when gradients and weights are communicated.

ZeRO-1 to ZeRO-3 are the stages of Rajbhandari et al., ZeRO (2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import ABOVE_0, FROM_0, FROM_1, Idle, Refused, excludes, flag, needs
from megapipe.config.parallel.pipeline import shares_grads
from megapipe.config.parallel.ranks import REPLICAS

BUCKETS = needs("overlap_grad_reduce", "all is reduced at the end")
SAME = "{} and {} say the same"


# An update of post-validation comes before the sums of the whole batch are known.
def _early(other: str, why: str) -> Refused:
    """Return the annotation that refuses --enable-optimizer-post-validation next to another flag.

    Args:
        other: the field of the other flag.
        why: why an update cannot come before the end of the step with that flag.
    """
    return excludes(other, f"{{}} updates before other ranks are done, and {{}} {why}")


@dataclass(frozen=True)
class ShardingConfig:
    """Shards of optimizer state, gradients and weights over data-parallel ranks."""

    # Which tensors are sharded.
    # No notes for --load here: a checkpoint has full tensors under every sharding.
    use_distributed_optimizer: Annotated[
        bool,
        REPLICAS,
        Idle(
            lambda c: c.parallel.use_megatron_fsdp or c.parallel.use_torch_fsdp2,
            "--data-parallel-sharding-strategy decides the shards, "
            "with --use-megatron-fsdp or --use-torch-fsdp2",
        ),
    ] = False
    """Shard a stage's main parameters and optimizer state over data-parallel ranks (ZeRO-1).
    Results are bitwise equal."""
    use_megatron_fsdp: Annotated[bool, REPLICAS, excludes("use_torch_fsdp2", SAME)] = False
    """Shard what --data-parallel-sharding-strategy says over data-parallel ranks."""
    use_torch_fsdp2: Annotated[bool, REPLICAS] = False
    """Shard optimizer state, gradients and weights over data-parallel ranks, by the name that
    Megatron-LM has for PyTorch's FSDP. The same as --use-megatron-fsdp by default."""
    data_parallel_sharding_strategy: Annotated[
        Literal["no_shard", "optim", "optim_grads", "optim_grads_params"],
        REPLICAS,
        needs("use_megatron_fsdp", "--use-distributed-optimizer decides the shards"),
    ] = "optim_grads_params"
    """What --use-megatron-fsdp shards. no_shard: nothing. optim: as --use-distributed-optimizer.
    optim_grads: gradients too, so that a rank keeps its part of their sum (ZeRO-2).
    optim_grads_params: weights too, gathered while passes use them (ZeRO-3)."""
    data_parallel_flops_per_byte: Annotated[
        float,
        ABOVE_0,
        REPLICAS,
        Idle(
            lambda c: not c.parallel.shards_grads,
            "gradients are whole: nothing is gathered for runs",
        ),
    ] = 8000.0
    """FLOPs of a device in the time that one byte takes between data-parallel ranks. It decides for
    how many passes gathered tensors are kept, where --pipeline-costs has no a and g. The default
    is 500 TFLOP/s over 62.5 GB/s; within a node of 300 GB/s it is 1667. Not in Megatron-LM."""
    # When gradients are reduced, and weights gathered.
    overlap_grad_reduce: Annotated[bool, REPLICAS] = False
    """Reduce the gradients of a stage while other stages still compute, as passes G of the table.
    Default: reduce all at the end of the step."""
    ddp_bucket_size: Annotated[
        int | None, FROM_1, REPLICAS, BUCKETS, excludes("ddp_num_buckets", SAME)
    ] = None
    """Least number of gradient elements that are reduced at once, while the stage's last weight
    pass computes earlier layers. Default: a whole stage at once, after that pass."""
    ddp_num_buckets: Annotated[int | None, FROM_1, REPLICAS, BUCKETS] = None
    """Largest number of buckets per stage, instead of --ddp-bucket-size. Default: one. Experts have
    buckets of their own."""
    # Megatron-LM demands both flags, too.
    overlap_param_gather: Annotated[
        bool,
        REPLICAS,
        Idle(
            lambda c: c.parallel.shards_weights,
            "weights are gathered during passes anyway, for each time that passes use them, "
            "with --data-parallel-sharding-strategy optim_grads_params",
        ),
        Refused(
            "{} gathers what --use-distributed-optimizer splits, "
            "and what --overlap-grad-reduce reduces. "
            "Add both, or leave --overlap-param-gather out.",
            lambda c: not (c.parallel.overlap_grad_reduce and c.parallel.splits_optimizer),
        ),
    ] = False
    """Gather the updated weights of a stage at the start of the next step, as passes A of the
    table. Default: gather all at the end of the step."""
    # Updates that do not wait (Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 4).
    enable_optimizer_post_validation: Annotated[
        bool,
        _early("calculate_per_token_loss", "divides by the tokens of the whole batch"),
        _early("error_injection_rate", "runs a step twice"),
        _early("check_for_spiky_loss", "must know the loss of the whole batch"),
        _early("freeze_all_layers", "updates nothing"),
        _early("reschedule_after", "times steps that end by themselves"),
        excludes(
            "use_megatron_fsdp use_torch_fsdp2",
            "{} repeats forwards after a wrong guess, and {} frees the weights that they need",
            where=shares_grads,
        ),
    ] = False
    """Update before the gradient's norm is known, in passes U, without a barrier between steps. A
    pass V in the next step undoes a wrong guess. Results are bitwise equal. Not in Megatron-LM."""
    post_validation_after: Annotated[
        int,
        FROM_0,
        needs("enable_optimizer_post_validation", "each update waits for the norm"),
    ] = 10
    """Number of steps in a row without clipping or skipping after which updates no longer wait for
    the norm. Not in Megatron-LM."""

    @property
    def splits_optimizer(self) -> bool:
        """Return whether optimizer state is sharded (ZeRO-1)."""
        return self._sharding != "no_shard"

    @property
    def shards_grads(self) -> bool:
        """Return whether gradients are sharded too, except while passes add to them (ZeRO-2)."""
        return "grads" in self._sharding

    @property
    def shards_weights(self) -> bool:
        """Return whether weights are sharded too, except while passes read them (ZeRO-3)."""
        return "params" in self._sharding

    @property
    def _sharding(self) -> str:
        # First, as it knows one strategy only: the flag that names others is not read with it.
        if self.use_torch_fsdp2:
            return "optim_grads_params"
        if self.use_megatron_fsdp:
            return self.data_parallel_sharding_strategy
        return "optim" if self.use_distributed_optimizer else "no_shard"

    @property
    def splits_by(self) -> str:
        """The flag that shards optimizer state; empty if none does."""
        for name in ("use_torch_fsdp2", "use_megatron_fsdp", "use_distributed_optimizer"):
            if getattr(self, name):
                return flag(name)
        return ""
