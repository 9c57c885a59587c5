"""Batch sizes: each that a run comes to must divide into microbatches, of which its schedule can make a table."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.checks.inputs import ask
from megapipe.checks.numbers import division, near
from megapipe.checks.pipeline import FORWARDS, pipeline_problems
from megapipe.config import Config
from megapipe.plan import forwards
from megapipe.schedule import SCHEDULES


def sound_batch(config: Config) -> tuple[Config, list[str]]:
    """Problems of the flags of the batch, and the configuration without those that say none."""
    if not config.batch.micro_batch_size or not config.data_parallel_size:
        return config, []
    problems = ask(lambda: config.batch_sizes)
    usual = config.batch.micro_batch_size * config.data_parallel_size
    return (config.with_batch(usual) if problems else config), problems


def batch_problems(config: Config) -> Iterator[str]:
    """Problems with every size that the run comes to, and with its evaluations."""
    wrong: dict[str, None] = {}
    for size in sorted({_kind(config, size): size for size in reversed(config.batch_sizes.distinct)}.values()):
        wrong |= dict.fromkeys(_of_size(config.with_batch(size), "--global-batch-size", "--micro-batch-size"))
    whole, micro = config.data.eval_global_batch_size, config.data.eval_micro_batch_size
    if (whole or micro) and not wrong:
        names = "--eval-global-batch-size" if whole else "--global-batch-size", "--eval-micro-batch-size"
        wrong |= dict.fromkeys(_of_size(config.evaluation, names[0], names[1] if micro else "--micro-batch-size"))
    yield from list(wrong)[:3]
    if (after := config.parallel.reschedule_after) is not None and len(config.batch_sizes.distinct) > 1:
        yield f"--reschedule-after {after} searches a table for one batch size, and this batch grows. Leave it out."
    samples, first = config.batch.train_samples, config.batch_sizes.at(0)
    if samples is not None and samples < first:
        yield f"--train-samples {samples} is less than one batch of {first} (--global-batch-size)."


def _kind(config: Config, size: int) -> tuple[int, int]:
    """Equal for sizes that a named schedule takes or refuses alike: of a growing batch the least of each is asked.

    It may ask for a least number of microbatches, at most 2p, and for one that divides by p or by 2.
    """
    count, rest = divmod(size, config.batch.micro_batch * config.data_parallel_size)
    twice, name = 2 * config.parallel.pipeline_model_parallel_size, config.parallel.pipeline_schedule
    if rest or (name and name.lower() not in SCHEDULES) or count < 2 * twice:
        return count, rest
    return twice + count % twice, 0


def _of_size(config: Config, whole: str, micro: str) -> Iterator[str]:
    batch, share = config.global_batch_size, config.batch.micro_batch * config.data_parallel_size
    if batch % share:
        yield (
            f"{whole} {batch} does not divide by {micro} {config.batch.micro_batch} x {config.data_parallel_size} "
            f"data-parallel ranks = {share}: {division(batch, share)}.\n      Use {whole} {near(batch, share)}."
        )
        yield from pipeline_problems(config, None)
    elif any(pipeline_problems(config, _kind(config, batch)[0])) or (  # by a table as small as can be
        forwards(config, config.num_microbatches) > FORWARDS
    ):
        yield from pipeline_problems(config, config.num_microbatches)
