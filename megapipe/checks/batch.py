"""Checks of batch sizes: each must consist of whole microbatches, and suit the schedule."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.checks.inputs import ask
from megapipe.checks.numbers import division, near
from megapipe.checks.pipeline import FORWARDS, pipeline_problems
from megapipe.config import Config
from megapipe.plan import forwards
from megapipe.schedule import SCHEDULES


def sound_batch(config: Config) -> tuple[Config, list[str]]:
    """Return (a configuration for the other checks, the problems of the batch's flags).

    Without problems the configuration is `config`. With problems the batch is replaced by one
    microbatch for each data-parallel rank, so that the other checks can go on. Nothing is checked
    without --micro-batch-size, or if the ranks are too few for one replica of the model.
    """
    if not config.batch.micro_batch_size or not config.data_parallel_size:
        return config, []
    problems = ask(lambda: config.batch_sizes)
    usual = config.batch.micro_batch_size * config.data_parallel_size
    return (config.with_batch(usual) if problems else config), problems


def batch_problems(config: Config) -> Iterator[str]:
    """Yield the problems of the batch sizes in training and evaluation: the first three, if more.

    Problems of --reschedule-after and --train-samples with these sizes follow.
    """
    wrong: dict[str, None] = {}
    # Reversed, so that the smallest size of each kind stays.
    smallest = {_kind(config, size): size for size in reversed(config.batch_sizes.distinct)}
    for size in sorted(smallest.values()):
        of_size = _of_size(config.with_batch(size), "--global-batch-size", "--micro-batch-size")
        wrong |= dict.fromkeys(of_size)
    whole = config.data.eval_global_batch_size
    micro = config.data.eval_micro_batch_size
    if (whole or micro) and not wrong:
        whole_name = "--eval-global-batch-size" if whole else "--global-batch-size"
        micro_name = "--eval-micro-batch-size" if micro else "--micro-batch-size"
        wrong |= dict.fromkeys(_of_size(config.evaluation, whole_name, micro_name))
    # A batch that grows has many sizes, and most of their problems are one problem.
    yield from list(wrong)[:3]
    after = config.parallel.reschedule_after
    if after is not None and len(config.batch_sizes.distinct) > 1:
        yield (
            f"--reschedule-after {after} searches a table for one batch size, "
            "and this batch grows. Leave it out."
        )
    samples = config.batch.train_samples
    first = config.batch_sizes.at(0)
    if samples is not None and samples < first:
        yield (
            f"--train-samples {samples} is less than one batch of {first} (--global-batch-size)."
        )


def _kind(config: Config, size: int) -> tuple[int, int]:
    """Return a key of a batch size: a schedule accepts all sizes with an equal key, or none.

    A schedule may demand a least number of microbatches, up to 2p, and a multiple of p or 2; p is
    the number of pipeline ranks. If the batch grows during a run, only the smallest size with each
    key has to be checked.

    Args:
        size: the batch size in sequences.
    """
    count, rest = divmod(size, config.batch.micro_batch * config.data_parallel_size)
    twice = 2 * config.parallel.pipeline_model_parallel_size
    name = config.parallel.pipeline_schedule
    # A file or a function may refuse any number, so each number is a kind.
    if rest or (name and name.lower() not in SCHEDULES) or count < 2 * twice:
        return count, rest
    return twice + count % twice, 0


def _of_size(config: Config, whole: str, micro: str) -> Iterator[str]:
    """Yield the problems of `config`, whose batch does not grow.

    Args:
        whole: the flag to name for the batch size, such as --eval-global-batch-size.
        micro: the flag to name for the size of a microbatch.
    """
    batch = config.global_batch_size
    share = config.batch.micro_batch * config.data_parallel_size
    if batch % share:
        yield (
            f"{whole} {batch} is not divisible by {micro} {config.batch.micro_batch} x "
            f"{config.data_parallel_size} data-parallel ranks = {share}: "
            f"{division(batch, share)}.\n      Use {whole} {near(batch, share)}."
        )
        # The number of microbatches is not known; the layers can be checked without it.
        yield from pipeline_problems(config, None)
        return
    # A small table of the same kind is made first. The table itself is made only if that one has
    # problems, for their numbers, or to report that it would be too large.
    small = _kind(config, batch)[0]
    count = config.num_microbatches
    if any(pipeline_problems(config, small)) or forwards(config, count) > FORWARDS:
        yield from pipeline_problems(config, count)
