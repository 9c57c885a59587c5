"""Pipeline schedules as data. Pure Python: works without torch."""

from megapipe.schedule.passes import (
    Exchange,
    Kind,
    Message,
    Pass,
    Placement,
    Program,
    Schedule,
    ScheduleError,
    Step,
    loop,
    mirror,
    vee,
)

__all__ = [
    "Exchange",
    "Kind",
    "Message",
    "Pass",
    "Placement",
    "Program",
    "Schedule",
    "ScheduleError",
    "Step",
    "loop",
    "mirror",
    "vee",
]
