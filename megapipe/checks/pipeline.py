"""Checks of schedule, stages and layers: does the schedule exist, and do the layers fill it?"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.checks.inputs import ask
from megapipe.checks.slices import slice_problems
from megapipe.config import Config
from megapipe.errors import ScheduleError
from megapipe.plan import (
    chunks_of,
    counts_of,
    forwards,
    ranks_of_depths,
    schedule_name,
    schedule_of,
)
from megapipe.schedule import SCHEDULES, Placement, Schedule, build, is_file, load

FORWARDS = 500_000
"""Limit on the forwards of a step in one table. To make that table takes half a minute."""


def pipeline_problems(config: Config, microbatches: int | None) -> Iterator[str]:
    """Yield the problems of the flags of schedule, stages and split.

    Args:
        microbatches: per step and data-parallel rank; None if the batch is not known.
    """
    par = config.parallel
    # Without chunks there is no placement. A wrong name of a schedule is the likelier cause, and is
    # asked first.
    if unclear := ask(lambda: chunks_of(config)):
        given = par.pipeline_schedule
        if given and given.lower() not in SCHEDULES and not is_file(given):
            for text in ask(lambda: build(given, 1, 1)):
                yield _named(given, text)
        yield from unclear
        return
    name = schedule_name(config)
    if microbatches is None and is_file(name):
        return  # a file is made for one number of microbatches
    # Every schedule of the catalogue accepts 4p microbatches, so layers can be checked with any
    # batch.
    usual = 4 * par.pipeline_model_parallel_size
    count = microbatches or usual
    if too_large := table_problem(config, count):
        yield too_large
        return
    refused = ask(lambda: schedule_of(config, count))
    for text in refused:
        if text.startswith("--"):
            yield text
        else:
            yield _named(name, text) + _remedy(config, name, microbatches)
    if not refused:
        table = schedule_of(config, count)
        placement = table.placement
        yield from _twin_problems(name, placement)
        yield from _reschedule_problems(config, name, placement)
        yield from _vocabulary_problems(config, name, placement)
        yield from _depth_problems(config, name, table)
        if par.pipeline_slices or table.cuts:
            yield from slice_problems(config, name, table)
    if config.model.num_layers and (not refused or name.lower() in SCHEDULES):
        # The layers do not depend on the number of microbatches: with one that fits, they are
        # checked beyond a batch that does not.
        sound = usual if refused else count
        for text in ask(lambda: counts_of(config, schedule_of(config, sound).placement)):
            # The same sentence may come from the table and from the layers.
            if text not in refused:
                yield text


def table_problem(config: Config, microbatches: int) -> str | None:
    """Return an error if a step has more than FORWARDS forward passes, else None.

    The schedule table of so large a step would take minutes to make.

    Args:
        microbatches: number of microbatches per step and data-parallel rank.
    """
    count = forwards(config, microbatches)
    if count <= FORWARDS:
        return None
    pp = config.parallel.pipeline_model_parallel_size
    return (
        f"--pipeline-model-parallel-size {pp} and {microbatches} microbatches make {count} "
        f"forwards of a step, and a table has at most {FORWARDS}. "
        "Use fewer stages, a larger --micro-batch-size or a smaller --global-batch-size."
    )


def _named(schedule: str, text: str) -> str:
    """Return the text of a problem as a sentence that begins with --pipeline-schedule.

    Args:
        schedule: the schedule's name.
        text: the problem. The name is put before it, unless it begins with the name.
    """
    if text.startswith(schedule):
        return f"--pipeline-schedule {text}"
    return f"--pipeline-schedule {schedule}: {text}"


def _remedy(config: Config, name: str, microbatches: int | None) -> str:
    """Return the end of an error about a number of microbatches that a schedule refuses.

    The text shows from which flags the number follows. For a schedule file it also says for which
    --global-batch-size or pipeline size the file was made.

    Args:
        name: the schedule's name.
        microbatches: the number; None if it is not known. The text is empty then.
    """
    if microbatches is None:
        return ""
    pp = config.parallel.pipeline_model_parallel_size
    micro = config.batch.micro_batch_size
    share = (micro or 1) * config.data_parallel_size
    arithmetic = (
        f"\n      {microbatches} microbatches = --global-batch-size {config.global_batch_size} / "
        f"(--micro-batch-size {micro} x {config.data_parallel_size} data-parallel ranks), "
        f"--pipeline-model-parallel-size {pp}"
    )
    if not is_file(name):
        return arithmetic if name.lower() in SCHEDULES or ":" in name else ""
    try:
        made = load(name)
    except ScheduleError:  # it cannot be read: other numbers would not help
        return ""
    fitting = f"--global-batch-size {made.num_microbatches * share}"
    if made.placement.num_ranks != pp:
        fitting = f"--pipeline-model-parallel-size {made.placement.num_ranks}"
    return f"{arithmetic}.\n      Use {fitting}, or make the file for it."


def _vocabulary_problems(config: Config, name: str, place: Placement) -> Iterator[str]:
    """Yield problems of --vocab-parallel-pipeline, which splits the vocabulary over pipeline ranks.

    The flag adds passes of embedding and head on every rank. A schedule file may not have these
    passes already, and the number of rows must be divisible by pipeline x tensor-parallel ranks.

    Args:
        name: the schedule's name, for the text.
        place: on which rank each stage of the schedule is.
    """
    par = config.parallel
    model = config.model
    flag = "--vocab-parallel-pipeline"
    if place.vocabulary:
        yield (
            f"--pipeline-schedule {name} has passes of a shared vocabulary, which {flag} makes. "
            "Leave them out."
        )
    if not par.vocab_parallel_pipeline:
        return
    pp = par.pipeline_model_parallel_size
    tp = par.tensor_model_parallel_size
    # The pipeline cuts the rows first, then tensor parallelism cuts each share.
    pieces = pp * tp
    rows = "--padded-vocab-size"
    if model.padded_vocab_size is None:
        rows = "--make-vocab-size-divisible-by"
    words = model.padded_vocab_size or model.make_vocab_size_divisible_by
    if words % pieces:
        yield (
            f"{flag} deals rows of {rows} {words} to {pieces} ranks "
            f"(--pipeline-model-parallel-size {pp} x --tensor-model-parallel-size {tp}), "
            f"which do not divide it. Use {rows} {-(-words // pieces) * pieces}."
        )


def _depth_problems(config: Config, name: str, schedule: Schedule) -> Iterator[str]:
    """Yield problems of multi-token prediction (--mtp-num-layers) with the layout or the schedule.

    Args:
        name: the schedule's name, for the text.
    """
    place = schedule.placement
    unfit = ask(lambda: ranks_of_depths(config, place))
    yield from unfit
    depths = config.model.depths
    if not depths:
        return
    others = [kind for kind in schedule.kinds if kind.traits.per_stage]
    if others:
        yield (
            f"--pipeline-schedule {name} has {', '.join(others)}, and --mtp-num-layers {depths} is "
            "put into tables of F, B, W, BW alone."
        )
    if place.num_chains == 1 or unfit:
        return
    last = place.num_ranks - 1
    layout = config.parallel.pipeline_model_parallel_layout
    for ranks in ranks_of_depths(config, place):
        if inner := sorted({*ranks} - {0, last}):
            yield (
                f"--pipeline-schedule {name} has two copies of the model, whose ends are on ranks "
                f"0 and {last}: --pipeline-model-parallel-layout {layout} has m on rank "
                f"{inner[0]}. List m with E or L, or use dualpipe-v."
            )


def _twin_problems(name: str, place: Placement) -> Iterator[str]:
    """Yield the first problem of a schedule with two copies of the model, as in DualPipe.

    The two copies of a stage must be on ranks r and p - 1 - r of p pipeline ranks, as gradients
    are summed between these two. A schedule from a file may place them otherwise.

    Args:
        name: the schedule's name, for the text.
        place: on which rank each stage of the schedule is.
    """
    if place.num_chains > 2:
        yield (
            f"--pipeline-schedule {name}: the model is there {place.num_chains} times; "
            "at most two chains train."
        )
    if place.num_chains != 2:
        return
    last = place.num_ranks - 1
    for stage in range(place.chain):
        replica = stage + place.chain
        rank = place.rank_of[stage]
        twin = place.rank_of[replica]
        # The groups that sum the gradients of copies are pairs of mirrored ranks
        # (ProcessMesh.twins).
        if rank == twin or rank + twin != last:
            yield (
                f"--pipeline-schedule {name}: stage {stage} is on rank {rank}, its replica "
                f"{replica} on {twin}. Gradients are summed between mirrored ranks, 0 and {last}, "
                "and so on inward."
            )
            return
    if empty := set(range(place.num_ranks)) - set(place.rank_of[: place.chain]):
        yield (
            f"--pipeline-schedule {name}: rank {min(empty)} has no stage of the first chain, "
            f"0 to {place.chain - 1}. With two chains every rank needs a stage of each."
        )


def _reschedule_problems(config: Config, name: str, place: Placement) -> Iterator[str]:
    """Yield problems of --reschedule-after N, which searches a new schedule after N steps.

    The schedule may not have two copies of the model, and the run must be longer than N steps.

    Args:
        name: the schedule's name, for the text.
        place: on which rank each stage of the schedule is.
    """
    after = config.parallel.reschedule_after
    if after is None:
        return
    given = f"--reschedule-after {after}"
    if place.num_chains > 1:
        yield (
            f"{given} searches orders of one copy of the model; {name} has two. "
            "Leave it out, or use dualpipe-v."
        )
    iters = config.batch.train_iters
    if iters is not None and iters <= after:
        yield f"{given} leaves nothing of --train-iters {iters} to gain in. Leave it out."
