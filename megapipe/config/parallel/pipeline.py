"""The pipeline of a run: its schedule, which layers a stage has, and pieces of microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megapipe.config.notes import ABOVE_0, FROM_1, LISTED, Idle, at_least, demands, excludes, needs
from megapipe.schedule.catalogue import SCHEDULES, usual

# A single rank can have several stages, too, if chunks or a schedule give them.
SEVERAL_STAGES = Idle(
    lambda c: (
        c.parallel.pipeline_model_parallel_size == 1
        and not (c.parallel.chunks or c.parallel.pipeline_schedule)
    ),
    "one stage has all layers, without --pipeline-model-parallel-size of at least 2",
)
STAGES = "{} and {} both say the stages of a rank"
LAYERS = "{} and {} both say the layers of a stage"
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


# Any, because Config imports this file.
def shares_grads(config: Any) -> bool:
    """Return whether gradients are sharded over several ranks."""
    return bool(config.parallel.shards_grads and config.weight_replicas > 1)


def _no_groups(config: Any) -> bool:
    """Return whether the schedule has no groups of microbatches; the interleaved one has them."""
    par = config.parallel
    # Two stands for several stages on a rank; `usual` asks for no more than that.
    chunks = 2 if par.chunks or par.pipeline_model_parallel_layout else None
    name = par.pipeline_schedule or usual(chunks)
    return name.lower() not in SCHEDULES or not SCHEDULES[name.lower()].grouped


@dataclass(frozen=True)
class PipelineConfig:
    """The order of passes, and the split of layers and microbatches."""

    # The order of passes.
    pipeline_schedule: str | None = None
    """Order of the passes: a schedule's name, a .json or .csv file, or FILE.py:NAME. Default: 1f1b,
    or interleaved where a rank has several stages. Not in Megatron-LM."""
    pipeline_costs: Annotated[
        str | None,
        excludes(
            "pipeline_model_parallel_layout",
            "{} times the stages of one split, {} makes another",
            where=lambda c: c.parallel.pipeline_model_parallel_layout == "auto",
        ),
    ] = None
    """JSON file with the times of passes and messages, as megapipe plan --save-costs writes it.
    Schedules are made for these times. Default: estimates from FLOPs. Not in Megatron-LM."""
    # Megatron-LM's name. Here it acts on tensor and context parallelism as well.
    overlap_moe_expert_parallel_comm: Annotated[
        bool,
        Idle(
            lambda c: not c.parallel.hides,
            "passes have no collective to hide, "
            "without --expert-model-parallel-size, --tensor-model-parallel-size "
            "or --context-parallel-size of at least 2",
        ),
        excludes(
            "vocab_parallel_pipeline reschedule_after", "{} and {} each make a table of their own"
        ),
    ] = False
    """Run two passes at once wherever the schedule allows, so that one computes while the other's
    collectives run."""
    delay_wgrad_compute: Annotated[
        bool,
        needs("overlap_moe_expert_parallel_comm", "schedules say where weight gradients stand"),
    ] = False
    """Split backwards that run alone too, and run their weight gradients where the rank would
    otherwise wait."""
    reschedule_after: Annotated[
        int | None,
        at_least(2),
        demands(
            "pipeline_model_parallel_size",
            says="{} orders the passes of a pipeline, and --pipeline-model-parallel-size is 1. "
            "Leave it out.",
            least=2,
        ),
        excludes("freeze_all_layers", "{} orders backwards, and {} leaves none"),
        excludes(
            "use_megatron_fsdp use_torch_fsdp2",
            "{} times passes, but not the collectives of {}",
            where=shares_grads,
        ),
    ] = None
    """Time the passes of iterations 2 to N, search for a faster order while the run goes on, and
    continue with it. Default: keep the schedule. Not in Megatron-LM."""
    # Stages of a rank, and layers of a stage.
    num_layers_per_virtual_pipeline_stage: Annotated[
        int | None,
        LISTED,
        excludes("num_virtual_stages_per_pipeline_rank", STAGES),
        excludes("pipeline_model_parallel_layout", LAYERS),
    ] = None
    """Number of layers of each stage, where a rank has several stages. Default: a rank has one
    stage, or as many as the schedule needs."""
    num_virtual_stages_per_pipeline_rank: Annotated[
        int | None,
        LISTED,
        excludes(
            "pipeline_model_parallel_layout",
            STAGES,
            where=lambda c: c.parallel.pipeline_model_parallel_layout != "auto",
        ),
    ] = None
    """Number of stages of each rank, instead of --num-layers-per-virtual-pipeline-stage."""
    microbatch_group_size_per_virtual_pipeline_stage: Annotated[
        int | None,
        FROM_1,
        Idle(_no_groups, "there is no chunk to visit, without several stages on a rank"),
    ] = None
    """Number of microbatches that pass one stage of a rank before its next stage begins, under
    interleaved. Default: the number of pipeline ranks."""
    decoder_first_pipeline_num_layers: Annotated[int | None, FROM_1, *ENDS] = None
    """Number of layers of the first pipeline rank, over all its stages. The other ranks split the
    rest evenly. Default: an even share."""
    decoder_last_pipeline_num_layers: Annotated[int | None, FROM_1, *ENDS] = None
    """Number of layers of the last pipeline rank, over all its stages. Default: an even share."""
    account_for_embedding_in_pipeline_split: Annotated[bool, SEVERAL_STAGES, ENDS[0]] = False
    """Count the embedding as a layer when layers are split evenly."""
    account_for_loss_in_pipeline_split: Annotated[bool, SEVERAL_STAGES, ENDS[0]] = False
    """Count output head and loss as a layer when layers are split evenly."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each stage, as Megatron-LM's string of E (embedding), t (layer) and L (loss). auto:
    the split with the least simulated time. Default: an even split."""
    # Pieces of microbatches and stages, and what they may hold.
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
    """Split the rows of embedding and output head evenly over the pipeline ranks, which compute
    them in passes of their own (E, S, C, T, EW). Not in Megatron-LM."""
    pipeline_slices: str | None = None
    """Number of slices that each microbatch is cut in along its sequence. auto: the number with the
    least simulated time. Default: microbatches are not cut. Not in Megatron-LM."""
    pipeline_slice_cuts: Annotated[
        Literal["work", "equal", "documents"], needs("pipeline_slices", "microbatches are whole")
    ] = "work"
    """Where slices are cut. work: all take equally long, so later slices are shorter. equal: all
    have the same number of tokens. documents: as work, moved to the nearest end of a document. Not
    in Megatron-LM."""
    memory_limit_gib: Annotated[float | None, ABOVE_0] = None
    """Limit in GiB on the memory that a rank is predicted to need for parameters, optimizer and
    activations. Activations that do not fit are copied to the host (O, L) or recomputed (R).
    Default: no limit. Not in Megatron-LM."""

    @property
    def chunks(self) -> int | None:
        """The value of the flag that gives a rank several stages; None without such a flag.

        With --num-layers-per-virtual-pipeline-stage, this is the number of layers of a stage. With
        --num-virtual-stages-per-pipeline-rank, it is the number of stages of a rank.
        """
        return (
            self.num_layers_per_virtual_pipeline_stage or self.num_virtual_stages_per_pipeline_rank
        )

    @property
    def cuts_at_documents(self) -> bool:
        """Return whether each cut between slices moves to the nearest end of a document.

        A slice is a range of tokens of each sequence of a microbatch, with passes of its own.
        """
        return self.pipeline_slice_cuts == "documents"
