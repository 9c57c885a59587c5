"""Check a configuration and plan its run by one call each. The commands call these too."""

from __future__ import annotations

from dataclasses import replace

from megapipe import plan
from megapipe.checks.run import validate
from megapipe.checks.vocabulary import with_vocabulary
from megapipe.config import Config
from megapipe.distributed.device import has_cuda
from megapipe.plan import Plan
from megapipe.training.check import report


def with_processes(config: Config) -> Config:
    """Return the configuration with the number of processes in `world_size`.

    The number is the value of --world-size, if given and positive. Else it is the launcher's number
    of processes, or the ranks of one replica of the model if these are more.
    """
    # A launcher would say it. Without one a plan of four stages is about four processes.
    given = config.check.world_size
    if given is None or given <= 0:
        given = max(config.world_size, config.parallel.least_ranks)
    return replace(config, world_size=given)


def ready(config: Config) -> Config:
    """Check the configuration, and return it with number of processes and padded vocabulary.

    Raises: ConfigError with every problem.
    """
    config = with_processes(config)
    # The embedding's rows are known once the tokenizer is.
    return with_vocabulary(config, validate(config, has_cuda=has_cuda()).vocab_size)


def make_plan(config: Config) -> Plan:
    """Return the plan of a run: its stages, and their predicted time and memory.

    Nothing is started. A notebook shows the plan as a table.

    Args:
        config: from `parse`, or built in Python. The number of processes is --world-size if that is
            given, else `config.world_size`, but at least the ranks of one replica.
    Raises: ConfigError with every problem of the configuration. ScheduleError if the schedule
    cannot be made as the flags ask.
    """
    # `megapipe plan` prints the configuration too, so it calls `ready` itself.
    return plan.make_plan(ready(config))


def check(config: Config) -> str:
    """Return a text on what would run, like `megapipe check` prints it. Nothing is started.

    Args:
        config: from `parse`, or built in Python. The number of processes is --world-size if that is
            given, else `config.world_size`, but at least the ranks of one replica.
    Raises: UserError with everything that a launch would refuse.
    """
    # As with --check, or the report would call --world-size a flag without effect.
    processes = with_processes(config).world_size
    return report(replace(config, check=replace(config.check, check=True, world_size=processes)))
