"""All problems of a configuration at once, before any process group exists.

Each check reads one subject and yields whole sentences. Where another room knows a rule, such as
the meaning of a schedule or the contents of a data file, that room is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megapipe.checks.batch import sound_batch
from megapipe.checks.context import context_problems
from megapipe.checks.experts import expert_problems
from megapipe.checks.inputs import (
    answer,
    checkpoint_problems,
    data_problems,
    machine_problems,
    path_problems,
    profile_problems,
)
from megapipe.checks.layout import layout_problems
from megapipe.checks.model import (
    delta_problems,
    offload_problems,
    override_problems,
    recompute_problems,
    shape_problems,
    window_problems,
)
from megapipe.checks.numbers import check_numbers
from megapipe.checks.refused import refusals
from megapipe.checks.training import learning_rate_problems, length_problems, training_problems
from megapipe.checks.vocabulary import tokenizer_problems
from megapipe.config import Config
from megapipe.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megapipe.errors import ConfigError

CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    refusals,
    shape_problems,
    window_problems,
    override_problems,
    recompute_problems,
    offload_problems,
    length_problems,
    expert_problems,
    delta_problems,
    context_problems,
    layout_problems,
    learning_rate_problems,
    training_problems,
    checkpoint_problems,
    profile_problems,
)
"""The checks of flags, in the order in which their problems are printed. Each value is sound."""


@dataclass(frozen=True)
class Problems:
    """All problems of a run, by what has to change, and the tokenizer that was read to find them.

    Attributes:
        flags: problems of the flags, on any machine.
        files: problems of files and folders that cannot be read or written.
        machine: texts on what this machine lacks.
        tokenizer: the tokenizer, so that its file is read once; it may be large, and slow to parse.
            None if it cannot be read; `files` then says why.
    """

    flags: list[str]
    files: list[str]
    machine: list[str]
    tokenizer: Tokenizer | None


def problems_of(config: Config, *, has_cuda: bool, own_data: bool = False) -> Problems:
    """Return all problems of a run. Nothing is started, and files are read, but no tokens.

    Args:
        config: the configuration, with the launcher's number of processes as `world_size`.
        has_cuda: whether torch can use a GPU here.
        own_data: whether the program gives its own data sets.
    """
    tokenizer, unread = answer(lambda: build_tokenizer(config.data))
    flags = flag_problems(config, own_data=own_data)
    flags += tokenizer_problems(config, tokenizer)
    files = [*path_problems(config), *unread]
    # Of sound values alone: a wrong one would be reported twice.
    machine = machine_problems(check_numbers(config)[0], has_cuda)
    return Problems(flags, files, list(machine), tokenizer)


def validate(config: Config, *, has_cuda: bool, own_data: bool = False) -> Tokenizer:
    """Refuse a run that has problems. `has_cuda` says whether torch can use a GPU here.

    `own_data` says whether the program gives its own data sets.

    Returns: the tokenizer.

    Raises: ConfigError with every problem.
    """
    found = problems_of(config, has_cuda=has_cuda, own_data=own_data)
    problems = [*found.flags, *found.files, *found.machine]
    if problems or found.tokenizer is None:
        raise ConfigError(problems)
    return found.tokenizer


def flag_problems(config: Config, *, own_data: bool = False) -> list[str]:
    """Return the problems that the flags have on any machine.

    Args:
        own_data: whether the program gives its own data sets.
    """
    # Each wrong value is at its default from here on. One typing error then gives one line and not
    # a dozen.
    sound, problems = check_numbers(config)
    sound, unclear = sound_batch(sound)
    problems += unclear
    for check in CHECKS:
        problems += check(sound)
    problems += data_problems(sound, own_data=own_data)
    return problems
