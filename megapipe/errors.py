"""The errors a user can act on. Each text is complete: flag or file, value, rule, remedy; no traceback is shown."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """Something the user can change. `problems` holds one complete text each; all are shown at once."""

    exit_code = 2
    """The status of the process. 2: a restart meets the same again."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return f"{len(self.problems)} problems\n" + "\n".join(f"  {p}" for p in self.problems)


class ConfigError(UserError):
    """Flags that contradict each other or what is at hand."""


class DataError(UserError):
    """A data set, text or tokenizer file that is missing, damaged or of another kind."""


class DataLost(DataError):
    """A file that could be read and cannot be any more: its disk or file system, which may come back."""

    exit_code = 1


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class ScheduleError(UserError, ValueError):
    """A schedule that cannot be built, read or run."""


class TrainingError(UserError):
    """Numbers of a training that cannot be right, and were the same twice; Megatron-LM's exit code for it."""

    exit_code = 17


class RanksDiffer(TrainingError):
    """Ranks that should have the same numbers have not: go on from the last checkpoint; Megatron-LM's exit code."""

    exit_code = 16
