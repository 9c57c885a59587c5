"""The configuration of a run: frozen dataclasses whose fields are Megatron-LM's flags.

The docstring under a field is its help text. A boolean field is a switch, off unless given. Where
Megatron-LM names the negative, as in `--disable-bias-linear`, the field has that name too, and a
property says the positive. Nothing is changed after parsing: values that Megatron-LM fills in
during its validation are properties here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass, replace
from typing import Annotated, Any, Literal, get_type_hints

from megapipe.config.batch import BatchConfig, BatchSizes
from megapipe.config.checkpoint import CheckpointConfig
from megapipe.config.data import DataConfig, TokenizerConfig
from megapipe.config.guards import GuardConfig
from megapipe.config.log import LogConfig
from megapipe.config.model import ModelConfig
from megapipe.config.model.fp8 import SHARED_SCALES
from megapipe.config.notes import LAUNCHED, LISTED, NEEDED, NO_FLAG, PREDICTED
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.precision import PrecisionConfig


@dataclass(frozen=True)
class CheckConfig:
    """Settings of --check, which reports the problems of a launch and starts nothing."""

    check: bool = False
    """Check everything, print the plan and what each flag does, and stop. It takes one process and
    no GPU, and ends with status 0 or 2. Not in Megatron-LM."""
    rates: Annotated[str | None, PREDICTED] = None
    """Speeds of a device and its links, by which megapipe plan and check predict seconds: h100,
    h200, h800, a100, a100-40, a100-80, b200, rtx4090, l40s, mi300x, or a .json (docs/cluster.md).
    A run itself predicts nothing by them. Default: h100; on CPUs check has no default. Not in
    Megatron-LM."""
    check_paths: Annotated[Literal["yes", "no"], NEEDED] = "yes"
    """Whether --check needs the run's files and folders. no: it lists missing ones, and goes on
    without them. Not in Megatron-LM."""
    world_size: Annotated[int | None, LISTED, LAUNCHED] = None
    """Number of processes that --check assumes. Default: WORLD_SIZE in the environment, else 1. Not
    in Megatron-LM."""


@dataclass(frozen=True)
class Config:
    """Everything that a run is made of.

    Each field of model, batch, optimizer, precision and data is annotated with a `Resume`. This
    says what --load does if the checkpoint was saved with another value, such as refuse it. Layout,
    schedule, files and logs may always differ.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    # These three are not among the sections: they say how a run was started, not which run it is.
    check: CheckConfig = field(default_factory=CheckConfig)
    world_size: Annotated[int, NO_FLAG] = 1
    """Number of processes, from the launcher; not a flag."""
    # Not compared: two configurations that do the same are equal, whichever idle flags were typed.
    noop_flags: Annotated[tuple[tuple[str, str], ...], NO_FLAG] = field(default=(), compare=False)
    """Flags that were given but set no field, each with what happens instead. Not a flag."""

    @property
    def sections(self) -> tuple[Any, ...]:
        """The sections from `model` to `log`, which describe the run, and thus not `check`."""
        return (
            self.model,
            self.parallel,
            self.batch,
            self.optimizer,
            self.precision,
            self.guards,
            self.data,
            self.checkpoint,
            self.log,
        )

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the model. Each trains on other samples."""
        return (self.world_size + self.lacks_a_rank) // self.parallel.ranks_of_a_replica

    @property
    def lacks_a_rank(self) -> bool:
        """Return whether one rank is missing, and its peers run its passes (--elastic)."""
        ranks = self.parallel.ranks_of_a_replica
        is_one_short = self.world_size > ranks > 1 and (self.world_size + 1) % ranks == 0
        flags = self.checkpoint
        # Without states in memory --elastic is without effect.
        return flags.elastic and flags.non_persistent_ckpt_type == "local" and is_one_short

    @property
    def can_reroute(self) -> bool:
        """Return whether peers could run the passes of a missing rank.

        They can if only data and pipeline parallelism split the run, and if no state outside of the
        optimizer changes in a step.
        """
        par = self.parallel
        plain = par.ranks_of_a_replica == par.pipeline_model_parallel_size
        shares = par.splits_optimizer or par.enable_optimizer_post_validation
        special = self.model.has_experts or self.model.fp8_format is not None
        return (
            plain
            and not (shares or special)
            and par.p2p_mode == "plain"
            and self.data.dataloader_type == "single"
        )

    @property
    def weight_replicas(self) -> int:
        """Number of ranks with equal weights, whose gradients are summed: data x context."""
        return self.data_parallel_size * self.parallel.context_parallel_size

    @property
    def expert_replicas(self) -> int:
        """Number of ranks with equal experts, whose gradients are summed.

        World size / (expert x expert tensor x pipeline parallel size).
        """
        par = self.parallel
        copy = par.expert_model_parallel_size * par.etp * par.pipeline_model_parallel_size
        return max(self.world_size // copy, 1)

    @property
    def equal_states(self) -> int:
        """Number of ranks with equal weights and equal optimizer state; 1 if no two ranks agree.

        Without experts it is `weight_replicas`, or 1 if ranks have shards of the state. With
        experts it is at most `expert_replicas`, as the experts of these ranks must be equal, too.
        """
        par = self.parallel
        if par.splits_optimizer and self.weight_replicas > 1:
            return 1
        if not self.model.has_experts:
            return self.weight_replicas
        return self.expert_replicas if par.etp == par.tensor_model_parallel_size else 1

    @property
    def copies_state(self) -> bool:
        """Return whether ranks copy their training state to memory that survives their restart."""
        trains = not (self.optimizer.freeze_all_layers or self.data.skip_train)
        return self.checkpoint.non_persistent_ckpt_type == "local" and trains

    @property
    def gathers_fp8(self) -> bool:
        """Return whether data-parallel ranks gather updated weights in eight bits."""
        model = self.model
        in_fp8 = model.fp8_format is not None and model.fp8_recipe != "mxfp8"
        sharded = self.parallel.splits_optimizer and self.weight_replicas > 1
        return model.fp8_param_gather and in_fp8 and sharded

    @property
    def overlaps_tp(self) -> bool:
        """Return whether matrix products overlap with their tensor-parallel collectives.

        A product is then computed in pieces, while the collective of another piece runs.
        """
        asked = self.model.tp_comm_overlap and self.parallel.tensor_model_parallel_size > 1
        return asked and not SHARED_SCALES.where(self)

    @property
    def gathers_later(self) -> bool:
        """Return whether updated weights are gathered at the beginning of the next step.

        Otherwise they are gathered right after the update. Weights in eight bits always wait for
        the next step, because the scales of earlier steps are known only then.
        """
        return self.parallel.overlap_param_gather or self.gathers_fp8

    def settled(self, model: ModelConfig) -> Config:
        """Return this configuration with `model`, and turn off its flags that have no effect here.

        An example is --fp8-param-gather on a single data-parallel rank. The flags of the result's
        model alone decide which kinds of layers are built.

        Args:
            model: the configuration of the model, or of one of its layers.
        """
        # Without this an idle flag would act after all: on a single data-parallel rank
        # --fp8-param-gather would keep Transformer Engine's linear layers out.
        model = replace(model, fp8_param_gather=self.gathers_fp8, tp_comm_overlap=self.overlaps_tp)
        return replace(self, model=model)

    @property
    def of_optimizer(self) -> dict[str, Any]:
        """The keyword arguments of `optim.optimizer.Optimizer` that flags decide."""
        par = self.parallel
        found: dict[str, Any] = {
            "distributed": par.splits_optimizer,
            "shards_grads": par.shards_grads,
            "shards_weights": par.shards_weights,
            "eight_bits": self.gathers_fp8,
            "gathers_later": self.gathers_later,
            "reduces_in_bf16": self.precision.grad_reduce_in_bf16,
        }
        if par.overlap_grad_reduce:
            found |= {"bucket_size": par.ddp_bucket_size, "num_buckets": par.ddp_num_buckets}
        return found

    @property
    def batch_sizes(self) -> BatchSizes:
        """The batch size of each step, which may grow over the run."""
        return BatchSizes.of(self.batch, self.data_parallel_size)

    @property
    def global_batch_size(self) -> int:
        """Number of sequences per step; for a batch that grows, the last and largest number."""
        return self.batch_sizes.last

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches per step and data-parallel rank, at the last batch size."""
        assert self.batch.micro_batch_size is not None
        return self.global_batch_size // (self.batch.micro_batch_size * self.data_parallel_size)

    @property
    def train_iters(self) -> int:
        """Number of steps from the beginning of the run to its end."""
        if self.batch.train_iters is not None:
            return self.batch.train_iters
        assert self.batch.train_samples is not None
        return self.batch_sizes.iterations(0, self.batch.train_samples)

    @property
    def train_samples(self) -> int:
        """--train-samples, or the number of samples in all steps of --train-iters.

        A run of --train-samples takes whole steps, and so may read fewer.
        """
        return self.batch.train_samples or self.batch_sizes.after(self.train_iters)

    def with_batch(self, size: int) -> Config:
        """Return the configuration with a constant batch of `size` sequences."""
        # Both ways to grow are removed, or they would win over the size.
        return self.with_fields(
            global_batch_size=size, rampup_batch_size=(), step_batch_size_schedule=None
        )

    @property
    def evaluation(self) -> Config:
        """The configuration with the batch of an evaluation, which is constant."""
        # An evaluation's batch is constant, also in a run whose batch grows.
        config = self.with_batch(self.data.eval_global_batch_size or self.global_batch_size)
        size = self.data.eval_micro_batch_size or self.batch.micro_batch_size
        return config.with_fields(micro_batch_size=size)

    def with_fields(self, **fields: Any) -> Config:
        """Return the configuration with these fields changed, whichever section they are in.

        Args:
            fields: field=value for each changed field.
        """
        changed = dict[str, dict[str, Any]]()
        for name, value in fields.items():
            changed.setdefault(SECTION_OF[name], {})[name] = value
        sections = {name: replace(getattr(self, name), **to) for name, to in changed.items()}
        return replace(self, **sections)

    def value(self, name: str) -> Any:
        """Return the value of a field by its name, whichever section it is in."""
        return getattr(getattr(self, SECTION_OF[name]), name)


_PARTS = {name: part for name, part in vars(Config()).items() if is_dataclass(part)}
# A field's name is in one section only, so the name alone finds it.
SECTION_OF = {field: section for section, part in _PARTS.items() for field in vars(part)}
"""The section of each field."""
KINDS = {
    name: kind for part in Config().sections for name, kind in get_type_hints(type(part)).items()
}
"""The type of each field of a run's sections."""
