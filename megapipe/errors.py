"""Define the errors that a user can mend.

Each text is complete: flag or file, value, rule and remedy. It is printed without a traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """An error that the user can mend, printed as a list of problems.

    Attributes:
        problems: the problems, one complete text each.
    """

    exit_code = 2
    """Status of the process. 2: a restart meets the same error again."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        # A text is a sequence of letters, too.
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return f"{len(self.problems)} problems\n" + "\n".join(f"  {p}" for p in self.problems)


class ConfigError(UserError):
    """Flags that contradict each other, the files, or the machine."""


class DataError(UserError):
    """A data set, text or tokenizer file that is missing, damaged or of another kind."""


class DataLost(DataError):
    """A file that was readable before and is not any more, such as on a lost network drive."""

    # Not 2: a restart may find the file again.
    exit_code = 1


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class ScheduleError(UserError, ValueError):
    """A schedule that cannot be built, read or run."""


class TrainingError(UserError):
    """A loss or norm that cannot be right, such as NaN, also when the step was run again."""

    # Megatron-LM's exit code for this, EXIT_CODE_FAILED_ON_RESULT_VALIDATION.
    exit_code = 17


class RanksDiffer(TrainingError):
    """Weights or counters that must be equal on ranks differ: resume from a checkpoint."""

    # Megatron-LM's, EXIT_CODE_RESUME_TO_DISAMBIGUATE.
    exit_code = 16
