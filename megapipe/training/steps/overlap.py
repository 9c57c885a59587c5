"""What flags add to a schedule's table: the rest of the step."""

from __future__ import annotations

from dataclasses import replace

from megapipe.config import Config
from megapipe.errors import ScheduleError
from megapipe.schedule import Kind, Schedule
from megapipe.schedule.transforms.optimizer import with_gather, with_optimizer
from megapipe.schedule.transforms.reduction import with_reduction


def with_overlap(schedule: Schedule, config: Config) -> Schedule:
    """The table with the rest of the step: what a file has of G and A, or what flags ask for. With post-validation U
    stands behind it and V before what writes gradients; without, the update is behind all, when the norm is known.

    Raises: ScheduleError for a table with V without that flag.
    """
    par = config.parallel
    late = par.enable_optimizer_post_validation
    if Kind.V in schedule.kinds and not late:
        raise ScheduleError(
            f"{schedule.name} has V, the validation of an update that did not wait for all ranks. Add "
            "--enable-optimizer-post-validation, or leave V out of the table."
        )
    rows = (tuple(step for step in row if step[0].kind not in (Kind.U, Kind.V)) for row in schedule.ranks)
    schedule = replace(schedule, ranks=tuple(rows))
    gathers = par.overlap_param_gather and config.weight_replicas > 1 and Kind.A not in schedule.kinds
    if Kind.G not in schedule.kinds and (late or (config.weight_replicas > 1 and par.overlap_grad_reduce)):
        schedule = with_reduction(schedule)
    if late:
        return with_optimizer(schedule, barrier=False, gather="ahead" if gathers else "none")
    return with_gather(schedule) if gathers else schedule
