"""The configuration of a run: frozen dataclasses whose fields are Megatron's flags; `flags` turns one into the other.

The docstring under a field is its help. A boolean field is a switch that is off unless given; where Megatron names the
negative (`--disable-bias-linear`), the field has that name too and a property says the positive.
Nothing here is ever changed after parsing: what Megatron fills in during validation is a property.
"""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass, replace
from typing import Annotated, Any, Literal, get_type_hints

from megapipe.config.batch import BatchConfig, BatchSizes
from megapipe.config.files import CheckpointConfig, DataConfig, LogConfig, TokenizerConfig
from megapipe.config.fp8 import SHARED_SCALES
from megapipe.config.guards import GuardConfig
from megapipe.config.model import ModelConfig
from megapipe.config.notes import LISTED, NO_FLAG, needs
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.precision import PrecisionConfig

_LAUNCHED = needs("check", "the launch tells")


@dataclass(frozen=True)
class CheckConfig:
    """Settings of --check."""

    check: bool = False
    """Check everything, print the plan and what becomes of each flag, and stop: one process, no GPU, status 0 or 2. Not
    in Megatron-LM."""
    check_paths: Annotated[Literal["yes", "no"], _LAUNCHED] = "yes"
    """no: files and folders that --check misses are listed, and the check goes on without them. Not in Megatron-LM."""
    world_size: Annotated[int | None, LISTED, _LAUNCHED] = None
    """Number of processes that --check assumes. Default: WORLD_SIZE in the environment, else 1. Not in Megatron-LM."""


@dataclass(frozen=True)
class Config:
    """Everything a run is made of. Each field of model, training and data says what becomes of it when it is not the
    checkpoint's; the others are free: layout, schedule, files, logs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    world_size: Annotated[int, NO_FLAG] = 1
    """Number of processes, from the launcher; not a flag."""
    holding: Annotated[tuple[tuple[str, str], ...], NO_FLAG] = field(default=(), compare=False)
    """Flags given that set no field, each with what happens instead, see flags.holds; not a flag."""

    @property
    def sections(self) -> tuple[Any, ...]:
        """Sections that the run is made of, without how it was started."""
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
        return self.world_size // self.parallel.ranks_of_a_replica

    @property
    def weight_replicas(self) -> int:
        """Ranks that hold the same weights and sum their gradients: data x context parallel."""
        return self.data_parallel_size * self.parallel.context_parallel_size

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts and sum their gradients."""
        par = self.parallel
        return max(self.world_size // (par.expert_model_parallel_size * par.etp * par.pipeline_model_parallel_size), 1)

    @property
    def gathers_fp8(self) -> bool:
        """Are weights gathered in eight bits?"""
        asked = self.model.fp8_param_gather and self.model.fp8_format is not None and self.model.fp8_recipe != "mxfp8"
        return asked and self.parallel.splits_optimizer and self.weight_replicas > 1

    @property
    def overlaps_tp(self) -> bool:
        """Do tensor-parallel ranks multiply in pieces?"""
        asked = self.model.tp_comm_overlap and self.parallel.tensor_model_parallel_size > 1
        return asked and not SHARED_SCALES.where(self)

    @property
    def gathers_later(self) -> bool:
        """Does a step leave the gathering of weights to the next one's beginning? In eight bits always: scales that
        follow from earlier steps are known then."""
        return self.parallel.overlap_param_gather or self.gathers_fp8

    def settled(self, model: ModelConfig) -> Config:
        """The configuration of a model; flags that have nothing to act on choose no layers in it."""
        model = replace(model, fp8_param_gather=self.gathers_fp8, tp_comm_overlap=self.overlaps_tp)
        return replace(self, model=model)

    @property
    def of_optimizer(self) -> dict[str, Any]:
        """Settings that optim.optimizer takes of the flags."""
        par = self.parallel
        buckets = {"bucket_size": par.ddp_bucket_size, "num_buckets": par.ddp_num_buckets}
        return {
            "distributed": par.splits_optimizer,
            "shards_grads": par.shards_grads,
            "shards_weights": par.shards_weights,
            "eight_bits": self.gathers_fp8,
            "gathers_later": self.gathers_later,
            "reduces_in_bf16": self.precision.grad_reduce_in_bf16,
            **(buckets if par.overlap_grad_reduce else {}),
        }

    @property
    def batch_sizes(self) -> BatchSizes:
        """Sequences per step, by the samples consumed before it."""
        return BatchSizes.of(self.batch, self.data_parallel_size)

    @property
    def global_batch_size(self) -> int:
        """Sequences per step; of a batch that grows, in the end."""
        return self.batch_sizes.last

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and data-parallel rank."""
        assert self.batch.micro_batch_size is not None
        return self.global_batch_size // (self.batch.micro_batch_size * self.data_parallel_size)

    @property
    def train_iters(self) -> int:
        if self.batch.train_iters is not None:
            return self.batch.train_iters
        assert self.batch.train_samples is not None
        return self.batch_sizes.iterations(0, self.batch.train_samples)

    @property
    def train_samples(self) -> int:
        """Samples that a run from the beginning reads."""
        return self.batch.train_samples or self.batch_sizes.after(self.train_iters)

    def with_batch(self, size: int) -> Config:
        """The configuration with a constant batch size."""
        return self.with_fields(global_batch_size=size, rampup_batch_size=(), step_batch_size_schedule=None)

    @property
    def evaluation(self) -> Config:
        """The configuration with the batch of an evaluation, which is constant."""
        config = self.with_batch(self.data.eval_global_batch_size or self.global_batch_size)
        size = self.data.eval_micro_batch_size or self.batch.micro_batch_size
        return config.with_fields(micro_batch_size=size)

    def with_fields(self, **fields: Any) -> Config:
        """Return the configuration with these fields, each in its section."""
        changed = dict[str, dict[str, Any]]()
        for name, value in fields.items():
            changed.setdefault(SECTION_OF[name], {})[name] = value
        return replace(self, **{section: replace(getattr(self, section), **to) for section, to in changed.items()})

    def value(self, name: str) -> Any:
        """Return the value of a field, from its section."""
        return getattr(getattr(self, SECTION_OF[name]), name)


SECTION_OF = {name: section for section, part in vars(Config()).items() if is_dataclass(part) for name in vars(part)}
"""The section of each field."""
KINDS = {name: kind for part in Config().sections for name, kind in get_type_hints(type(part)).items()}
"""The type of each field of a run's sections."""
