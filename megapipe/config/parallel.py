"""The spread of a model over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Annotated, Any, Literal

from megapipe.config.moe import EXPERTS
from megapipe.config.notes import (
    ABOVE_0,
    CLOCK,
    LISTED,
    UP_TO_1,
    Idle,
    Refused,
    at_least,
    demands,
    excludes,
    flag,
    needs,
)
from megapipe.schedule.catalogue import SCHEDULES, usual

SEVERAL_RANKS = needs("pipeline_model_parallel_size", "there is one pipeline rank", least=2)
SEVERAL_STAGES = Idle(
    lambda c: c.parallel.pipeline_model_parallel_size == 1 and not (c.parallel.chunks or c.parallel.pipeline_schedule),
    "one stage has all layers, without --pipeline-model-parallel-size of at least 2",
)
REPLICAS = Idle(
    lambda c: c.weight_replicas <= 1,
    "there is one copy of the weights, without several data- or context-parallel ranks",
)
BUCKETS = needs("overlap_grad_reduce", "all is reduced at the end")
Module = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
"""Part of a layer, by Megatron-LM's name."""
STAGES, LAYERS = "{} and {} both say the stages of a rank", "{} and {} both say the layers of a stage"
ENDS = (
    excludes("pipeline_model_parallel_layout", LAYERS),
    excludes(
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        "{} and {} both say which stages get fewer layers",
    ),
    excludes(
        "num_layers_per_virtual_pipeline_stage",
        "{} makes stages uneven, {} even",
        "Use --num-virtual-stages-per-pipeline-rank instead.",
    ),
)
SAME = "{} and {} say the same"
NOT_SEARCHED = excludes("reschedule_after", "{}: {} searches tables without copies")
COPIES = needs("fine_grained_activation_offloading cpu_offload memory_limit_gib", "nothing is copied")


def _shares_grads(config: Any) -> bool:
    return bool(config.parallel.shards_grads and config.weight_replicas > 1)


def _early(other: str, why: str) -> Refused:
    """Return the note of an update that does not wait for what the other flag does."""
    return excludes(other, f"{{}} updates before other ranks are done, and {{}} {why}")


def _no_groups(config: Any) -> bool:
    par = config.parallel
    name = par.pipeline_schedule or usual(2 if par.chunks or par.pipeline_model_parallel_layout else None)
    return name.lower() not in SCHEDULES or not SCHEDULES[name.lower()].grouped


@dataclass(frozen=True)
class ParallelConfig:
    """Settings of tensor, context, pipeline and data parallelism."""

    tensor_model_parallel_size: Annotated[int, LISTED] = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: Annotated[int, LISTED] = 1
    """Ranks that share the layers among them."""
    context_parallel_size: Annotated[int, LISTED] = 1
    """Ranks that share each sequence: of 2c pieces rank r has the r-th and the r-th from the end."""
    expert_model_parallel_size: Annotated[
        int,
        LISTED,
        demands("num_experts", says="{} shares experts, and there are none. Give --num-experts, or leave it out."),
    ] = 1
    """Ranks that share the experts of each layer; in all else they hold the same, or parts of one layer."""
    expert_tensor_parallel_size: Annotated[int | None, LISTED, EXPERTS] = None
    """Ranks that share each expert. Default: --tensor-model-parallel-size."""
    use_tp_pp_dp_mapping: Annotated[bool, SEVERAL_RANKS] = False
    """Number ranks along tensor, then pipeline, then data parallel, instead of pipeline last."""
    pipeline_schedule: str | None = None
    """Order of the passes: a name, .json or .csv file, or FILE.py:NAME. Default: 1f1b; interleaved for many stages. Not
    in Megatron-LM."""
    pipeline_costs: Annotated[
        str | None,
        excludes(
            "pipeline_model_parallel_layout",
            "{} times the stages of one split, {} makes another",
            where=lambda c: c.parallel.pipeline_model_parallel_layout == "auto",
        ),
    ] = None
    """A .json of what passes and messages take, as megapipe plan --save-costs writes it. Default: by FLOPs. Not in
    Megatron-LM."""
    overlap_moe_expert_parallel_comm: Annotated[
        bool,
        Idle(
            lambda c: not c.parallel.hides,
            "passes have no collective to hide, without --expert-model-parallel-size, --tensor-model-parallel-size "
            "or --context-parallel-size of at least 2",
        ),
        excludes("vocab_parallel_pipeline reschedule_after", "{} and {} each make a table of their own"),
    ] = False
    """Run two passes together wherever the schedule's ranks can, so that collectives of one hide behind the other."""
    delay_wgrad_compute: Annotated[
        bool, needs("overlap_moe_expert_parallel_comm", "schedules say where weight gradients stand")
    ] = False
    """Split backwards without a partner too, so that their weight gradients fill what would be a wait."""
    reschedule_after: Annotated[
        int | None,
        at_least(2),
        demands(
            "pipeline_model_parallel_size",
            says="{} orders the passes of a pipeline, and --pipeline-model-parallel-size is 1. Leave it out.",
            least=2,
        ),
        excludes("freeze_all_layers", "{} orders backwards, and {} leaves none"),
        excludes(
            "use_megatron_fsdp use_torch_fsdp2",
            "{} times passes, not what {} gathers and reduces beside them",
            where=_shares_grads,
        ),
    ] = None
    """Time the passes of iterations 2 to N, search a better order for them beside the run, and go on under it. Not in
    Megatron-LM."""
    num_layers_per_virtual_pipeline_stage: Annotated[
        int | None,
        LISTED,
        excludes("num_virtual_stages_per_pipeline_rank", STAGES),
        excludes("pipeline_model_parallel_layout", LAYERS),
    ] = None
    """Layers of each stage, where a rank holds several."""
    num_virtual_stages_per_pipeline_rank: Annotated[
        int | None,
        LISTED,
        excludes(
            "pipeline_model_parallel_layout",
            STAGES,
            where=lambda c: c.parallel.pipeline_model_parallel_layout != "auto",
        ),
    ] = None
    """Stages of each rank: the same by count."""
    microbatch_group_size_per_virtual_pipeline_stage: Annotated[
        int | None, at_least(1), Idle(_no_groups, "there is no chunk to visit, without several stages on a rank")
    ] = None
    """Microbatches that pass one chunk of a rank before the next begins, under interleaved. Default: pipeline ranks."""
    decoder_first_pipeline_num_layers: Annotated[int | None, at_least(1), *ENDS] = None
    """Layers of the first pipeline rank, over all its stages; the others share the rest evenly."""
    decoder_last_pipeline_num_layers: Annotated[int | None, at_least(1), *ENDS] = None
    """Layers of the last pipeline rank."""
    account_for_embedding_in_pipeline_split: Annotated[bool, SEVERAL_STAGES, ENDS[0]] = False
    """The embedding counts as a layer where stages are made even."""
    account_for_loss_in_pipeline_split: Annotated[bool, SEVERAL_STAGES, ENDS[0]] = False
    """The output head and loss count as a layer where stages are made even."""
    pipeline_model_parallel_layout: str | None = None
    """Megatron's string of E (embedding), t (layer) and L (loss); or auto: the split of least simulated time."""
    vocab_parallel_pipeline: Annotated[
        bool,
        demands(
            "pipeline_model_parallel_size",
            says="{} does not go with --pipeline-model-parallel-size 1. Leave one out.",
            least=2,
        ),
        excludes(
            "context_parallel_size model_provider pipeline_costs reschedule_after async_save "
            "enable_optimizer_post_validation account_for_embedding_in_pipeline_split "
            "account_for_loss_in_pipeline_split"
        ),
    ] = False
    """Each pipeline rank has an equal share of embedding and output head, in passes of their own (E, S, C, T, EW). Not
    in Megatron-LM."""
    pipeline_slices: str | None = None
    """Slices of each microbatch along its sequence: a number, or auto, which takes the one of least simulated time. Not
    in Megatron-LM."""
    pipeline_slice_cuts: Annotated[
        Literal["work", "equal", "documents"], needs("pipeline_slices", "microbatches are whole")
    ] = "work"
    """work: slices take equally long, later ones are shorter; equal: all are as long; documents: by work, then moved to
    the nearest end of a document. Not in Megatron-LM."""
    memory_limit_gib: Annotated[float | None, ABOVE_0] = None
    """Most memory that a rank may be predicted to need, for parameters, optimizer and activations. Of the activations
    of a run that does not fit, what has to is copied to the host (O, L) or computed again (R). Not in Megatron-LM."""
    use_distributed_optimizer: Annotated[
        bool,
        REPLICAS,
        Idle(
            lambda c: c.parallel.use_megatron_fsdp or c.parallel.use_torch_fsdp2,
            "--data-parallel-sharding-strategy says what is split, with --use-megatron-fsdp or --use-torch-fsdp2",
        ),
    ] = False
    """Split main parameters and Adam's moments of a stage over data parallel (ZeRO-1). Same bits."""
    use_megatron_fsdp: Annotated[bool, REPLICAS, excludes("use_torch_fsdp2", SAME)] = False
    """Split more of a stage over data parallel, as --data-parallel-sharding-strategy says."""
    use_torch_fsdp2: Annotated[bool, REPLICAS] = False
    """The same, all of it, under the name that Megatron-LM has for PyTorch's."""
    data_parallel_sharding_strategy: Annotated[
        Literal["no_shard", "optim", "optim_grads", "optim_grads_params"],
        REPLICAS,
        needs("use_megatron_fsdp", "--use-distributed-optimizer says what is split"),
    ] = "optim_grads_params"
    """no_shard: nothing; optim: as --use-distributed-optimizer; optim_grads: gradients too, each rank keeps a share
    of their sum (ZeRO-2); optim_grads_params: weights too, gathered for each run of a stage's passes (ZeRO-3)."""
    data_parallel_flops_per_byte: Annotated[
        float,
        ABOVE_0,
        REPLICAS,
        Idle(lambda c: not c.parallel.shards_grads, "gradients are whole: nothing is gathered for runs"),
    ] = 8000.0
    """FLOPs of a device while a byte comes over data parallel: how long shares are whole is chosen by it, where
    --pipeline-costs has no a and g. 400 TFLOP/s over 50 GB/s; 1333 within a node of 300 GB/s. Not in Megatron-LM."""
    overlap_grad_reduce: Annotated[bool, REPLICAS] = False
    """Reduce the gradients of a stage while others still compute, as passes G of the table."""
    ddp_bucket_size: Annotated[int | None, at_least(1), REPLICAS, BUCKETS, excludes("ddp_num_buckets", SAME)] = None
    """Gradient elements that are reduced at once, while a stage's last weight pass does the layers before. Default:
    all of a stage, behind it."""
    ddp_num_buckets: Annotated[int | None, at_least(1), REPLICAS, BUCKETS] = None
    """The same as a number of buckets per stage."""
    overlap_param_gather: Annotated[
        bool,
        REPLICAS,
        Idle(
            lambda c: c.parallel.shards_weights,
            "weights are gathered beside passes anyway, each run of which has its own, with "
            "--data-parallel-sharding-strategy optim_grads_params",
        ),
        Refused(
            "{} gathers what --use-distributed-optimizer splits, beside what --overlap-grad-reduce reduces. "
            "Add both, or leave --overlap-param-gather out.",
            lambda c: not (c.parallel.overlap_grad_reduce and c.parallel.splits_optimizer),
        ),
    ] = False
    """Gather the updated weights of a stage at the start of the next step, as passes A of the table."""
    enable_optimizer_post_validation: Annotated[
        bool,
        _early("calculate_per_token_loss", "divides by the tokens of the whole batch"),
        _early("error_injection_rate", "runs a step twice"),
        _early("check_for_spiky_loss", "must know the loss of the whole batch"),
        _early("freeze_all_layers", "updates nothing"),
        _early("reschedule_after", "times steps that end by themselves"),
        excludes(
            "use_megatron_fsdp use_torch_fsdp2",
            "{} repeats forwards after a wrong guess, and {} lets go of what they need",
            where=_shares_grads,
        ),
    ] = False
    """Update before the norm is known, passes U; V in the next step undoes a wrong guess. Same bits, no barrier. Not in
    Megatron-LM."""
    post_validation_after: Annotated[
        int, at_least(0), needs("enable_optimizer_post_validation", "each update waits for the norm")
    ] = 10
    """Steps in a row that were neither clipped nor skipped, after which no update waits for the norm. Not in
    Megatron-LM."""
    fine_grained_activation_offloading: Annotated[bool, NOT_SEARCHED] = False
    """Copy what a forward saved to the host until its backward, wherever it is back in time: passes O and L. With
    --memory-limit-gib only what has to leave, or is computed again instead (R), whatever is faster, as without this
    flag where the run does not fit."""
    activation_offload_fraction: Annotated[float, UP_TO_1, COPIES] = 1.0
    """Part of each microbatch's bytes that is copied to the host, the first of its forward."""
    offload_modules: Annotated[
        tuple[Module, ...], COPIES, excludes("compile", "{} names parts of a layer, and {} makes one of several")
    ] = ()
    """The parts of a layer whose saved inputs are copied; all that a forward saved where none is named."""
    cpu_offload: Annotated[bool, NOT_SEARCHED] = False
    """The same, under the name of sail-sg's zero-bubble fork. Not in Megatron-LM."""
    offload_chunk_num: Annotated[int | None, at_least(1), needs("cpu_offload", "all stages copy")] = None
    """Stages of each rank that copy, the first ones. Default: all. Not in Megatron-LM."""
    offload_time: Annotated[float | None, ABOVE_0, COPIES] = None
    """Time of a copy, each way, over that of a forward and backward. Default: by bytes, 50 GB/s at 400 TFLOP/s. Not in
    Megatron-LM."""
    no_overlap_p2p_communication: Annotated[
        bool,
        SEVERAL_RANKS,
        Idle(lambda c: c.parallel.use_ring_exchange_p2p, "messages go as ring exchanges, with --use-ring-exchange-p2p"),
    ] = False
    """Post messages between stages in batches instead of one by one."""
    use_ring_exchange_p2p: Annotated[bool, SEVERAL_RANKS] = False
    """Post messages between stages as ring exchanges, each complete as a unit; wins over the flag before."""
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    """Capture each stage's forward and backward as CUDA graphs, whatever the name; a line says where nothing is."""
    cuda_graph_warmup_steps: Annotated[
        int,
        at_least(1),
        Idle(lambda c: c.parallel.cuda_graph_impl == "none", "nothing is captured, without --cuda-graph-impl"),
    ] = 3
    """Steps before that, which show what passes are given."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl with a GPU, gloo without."""
    distributed_timeout_minutes: Annotated[float, CLOCK] = 10.0
    """How long a collective or message may take before the run is stopped."""
    distributed_timeout_seconds_after_init: Annotated[float | None, CLOCK] = None
    """The same from the second iteration on. Default: --distributed-timeout-minutes."""

    @property
    def hides(self) -> bool:
        """Do passes have collectives that a pass run with them can hide?"""
        return max(self.tensor_model_parallel_size, self.context_parallel_size, self.expert_model_parallel_size) > 1

    @property
    def etp(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def ranks_of_a_replica(self) -> int:
        """Ranks that see the same samples."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    @property
    def least_ranks(self) -> int:
        """The least number of ranks that has both a replica and a copy of all experts."""
        return lcm(
            self.ranks_of_a_replica, self.expert_model_parallel_size * self.etp * self.pipeline_model_parallel_size
        )

    @property
    def chunks(self) -> int | None:
        """Given, if a rank is to hold several stages, as layers of each or as their number."""
        return self.num_layers_per_virtual_pipeline_stage or self.num_virtual_stages_per_pipeline_rank

    @property
    def p2p_mode(self) -> Literal["plain", "batched", "ring"]:
        """The mode in which messages between stages are posted, see pipeline_parallel.transport."""
        if self.use_ring_exchange_p2p:
            return "ring"
        return "batched" if self.no_overlap_p2p_communication else "plain"

    @property
    def splits_optimizer(self) -> bool:
        """Has a data-parallel rank optimizer state of its share alone?"""
        return self._sharding != "no_shard"

    @property
    def shards_grads(self) -> bool:
        """And a share of the gradients alone, but while a run of passes adds to them?"""
        return "grads" in self._sharding

    @property
    def shards_weights(self) -> bool:
        """And of the weights, but while a run of passes reads them?"""
        return "params" in self._sharding

    @property
    def _sharding(self) -> str:
        if self.use_torch_fsdp2:
            return "optim_grads_params"
        if self.use_megatron_fsdp:
            return self.data_parallel_sharding_strategy
        return "optim" if self.use_distributed_optimizer else "no_shard"

    @property
    def splits_by(self) -> str:
        """The flag that splits optimizer state."""
        asked = "use_torch_fsdp2", "use_megatron_fsdp", "use_distributed_optimizer"
        return next((flag(name) for name in asked if getattr(self, name)), "")
