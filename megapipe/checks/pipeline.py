"""Schedule, stages and layers: does the schedule exist, does it mean these numbers, do the layers fill its stages?"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.checks.inputs import ask
from megapipe.checks.slices import slice_problems
from megapipe.config import Config
from megapipe.errors import ScheduleError
from megapipe.plan import chunks_of, counts_of, forwards, ranks_of_depths, schedule_name, schedule_of
from megapipe.schedule import SCHEDULES, Placement, Schedule, build, is_file, load

FORWARDS = 500_000
"""Most of a step that a table is made of, which takes half a minute."""


def pipeline_problems(config: Config, microbatches: int | None) -> Iterator[str]:
    """Problems with the pipeline's flags.

    Args:
        microbatches: per step and data-parallel rank; None if the batch is not known.
    """
    if unclear := ask(lambda: chunks_of(config)):
        given = config.parallel.pipeline_schedule
        if given and given.lower() not in SCHEDULES and not is_file(given):
            yield from (_named(given, text) for text in ask(lambda: build(given, 1, 1)))
        yield from unclear
        return
    name = schedule_name(config)
    if microbatches is None and is_file(name):
        return  # a file is made for one number of microbatches
    # Every schedule of the catalogue takes as many, so that layers are checked whatever the batch is.
    usual = 4 * config.parallel.pipeline_model_parallel_size
    if too_large := table_problem(config, microbatches or usual):
        yield too_large
        return
    refused = ask(lambda: schedule_of(config, microbatches or usual))
    for text in refused:
        yield text if text.startswith("--") else _named(name, text) + _remedy(config, name, microbatches)
    if not refused:
        placement = schedule_of(config, microbatches or usual).placement
        yield from _twin_problems(name, placement)
        yield from _reschedule_problems(config, name, placement)
        yield from _vocabulary_problems(config, name, placement)
        yield from _depth_problems(config, name, schedule_of(config, microbatches or usual))
        if config.parallel.pipeline_slices or schedule_of(config, microbatches or usual).cuts:
            yield from slice_problems(config, name, schedule_of(config, microbatches or usual))
    if config.model.num_layers and (not refused or name.lower() in SCHEDULES):
        count = usual if refused else microbatches or usual
        found = ask(lambda: counts_of(config, schedule_of(config, count).placement))
        yield from (text for text in found if text not in refused)


def table_problem(config: Config, microbatches: int) -> str | None:
    """A problem with a step so large that its table is a matter of minutes."""
    if (count := forwards(config, microbatches)) <= FORWARDS:
        return None
    return (
        f"--pipeline-model-parallel-size {config.parallel.pipeline_model_parallel_size} and {microbatches} "
        f"microbatches make {count} forwards of a step, and a table has at most {FORWARDS}. "
        "Use fewer stages, a larger --micro-batch-size or a smaller --global-batch-size."
    )


def _named(schedule: str, text: str) -> str:
    """A sentence that begins with the flag, which names the schedule once."""
    return f"--pipeline-schedule {text}" if text.startswith(schedule) else f"--pipeline-schedule {schedule}: {text}"


def _remedy(config: Config, name: str, microbatches: int | None) -> str:
    """The flags that a number comes from that a schedule may not work with, and for a file what would fit."""
    if microbatches is None:
        return ""
    par, micro = config.parallel, config.batch.micro_batch_size
    share = (micro or 1) * config.data_parallel_size
    told = (
        f"\n      {microbatches} microbatches = --global-batch-size {config.global_batch_size} / "
        f"(--micro-batch-size {micro} x {config.data_parallel_size} data-parallel ranks), "
        f"--pipeline-model-parallel-size {par.pipeline_model_parallel_size}"
    )
    if not is_file(name):
        return told if name.lower() in SCHEDULES or ":" in name else ""
    try:
        made = load(name)
    except ScheduleError:  # it cannot be read: other numbers would not help
        return ""
    if made.placement.num_ranks != par.pipeline_model_parallel_size:
        return f"{told}.\n      Use --pipeline-model-parallel-size {made.placement.num_ranks}, or make the file for it."
    return f"{told}.\n      Use --global-batch-size {made.num_microbatches * share}, or make the file for it."


def _vocabulary_problems(config: Config, name: str, place: Placement) -> Iterator[str]:
    """Yield what is wrong with the table or the rows of a shared vocabulary."""
    par, model, flag = config.parallel, config.model, "--vocab-parallel-pipeline"
    if place.vocabulary:
        yield f"--pipeline-schedule {name} has passes of a shared vocabulary, which {flag} makes. Leave them out."
    if not par.vocab_parallel_pipeline:
        return
    pieces = par.pipeline_model_parallel_size * par.tensor_model_parallel_size
    rows = "--make-vocab-size-divisible-by" if model.padded_vocab_size is None else "--padded-vocab-size"
    if (words := model.padded_vocab_size or model.make_vocab_size_divisible_by) % pieces:
        yield (
            f"{flag} deals rows of {rows} {words} to {pieces} ranks (--pipeline-model-parallel-size "
            f"{par.pipeline_model_parallel_size} x --tensor-model-parallel-size {par.tensor_model_parallel_size}), "
            f"which do not divide it. Use {rows} {-(-words // pieces) * pieces}."
        )


def _depth_problems(config: Config, name: str, schedule: Schedule) -> Iterator[str]:
    """Yield what is wrong with depths of multi-token prediction that a layout lists otherwise, or in such a table."""
    par, depths, place = config.parallel, config.model.depths, schedule.placement
    yield from ask(lambda: ranks_of_depths(config, place))
    if not depths:
        return
    flag, others = f"--mtp-num-layers {depths}", [kind for kind in schedule.kinds if kind.traits.per_stage]
    if others:
        yield f"--pipeline-schedule {name} has {', '.join(others)}, and {flag} is put into tables of F, B, W, BW alone."
    ends = {0, place.num_ranks - 1}
    if place.num_chains > 1 and not ask(lambda: ranks_of_depths(config, place)):
        for ranks in ranks_of_depths(config, place):
            if apart := sorted({*ranks} - ends):
                yield (
                    f"--pipeline-schedule {name} has two copies of the model, whose ends are on ranks 0 and "
                    f"{place.num_ranks - 1}: --pipeline-model-parallel-layout {par.pipeline_model_parallel_layout} has "
                    f"m on rank {apart[0]}. List m with E or L, or use dualpipe-v."
                )


def _twin_problems(name: str, place: Placement) -> Iterator[str]:
    """A schedule from a file may have chains that training cannot keep equal."""
    if place.num_chains > 2:
        yield f"--pipeline-schedule {name}: the model is there {place.num_chains} times; at most two chains train."
    for stage in range(place.chain if place.num_chains == 2 else 0):
        rank, twin = place.rank_of[stage], place.rank_of[stage + place.chain]
        if rank == twin or rank + twin != place.num_ranks - 1:
            yield (
                f"--pipeline-schedule {name}: stage {stage} is on rank {rank}, its replica {stage + place.chain} on "
                f"{twin}. Gradients are summed between mirrored ranks, 0 and {place.num_ranks - 1}, and so on inward."
            )
            return
    if place.num_chains == 2 and (empty := set(range(place.num_ranks)) - set(place.rank_of[: place.chain])):
        yield (
            f"--pipeline-schedule {name}: rank {min(empty)} has no stage of the first chain, 0 to {place.chain - 1}. "
            "With two chains every rank needs a stage of each."
        )


def _reschedule_problems(config: Config, name: str, place: Placement) -> Iterator[str]:
    """Settings that a search beside the run cannot better."""
    if (after := config.parallel.reschedule_after) is None:
        return
    given = f"--reschedule-after {after}"
    if place.num_chains > 1:
        yield f"{given} searches orders of one copy of the model; {name} has two. Leave it out, or use dualpipe-v."
    if (iters := config.batch.train_iters) is not None and iters <= after:
        yield f"{given} leaves nothing of --train-iters {iters} to gain in. Leave it out."
