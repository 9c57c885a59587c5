"""A batch that grows: sizes by Megatron-LM's formulas, the same bits as runs by hand, exact resume."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from functools import cache

import pytest
import short_run
from tiny import STYLES

from megapipe.checks.batch import _kind
from megapipe.checks.run import flag_problems
from megapipe.config import BatchConfig, CheckpointConfig, Config, LogConfig, ParallelConfig
from megapipe.config.batch import BatchSizes
from megapipe.data.build import Datasets
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.models.provider import gpt_provider
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import ScheduleError, build
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import Training


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "group-interleaved", "hanayo", "v-half", "dualpipe"])
def test_a_schedule_takes_all_sizes_of_a_kind_or_none(name):
    @cache
    def takes(count):
        try:
            return bool(build(name, 4, count))
        except ScheduleError:
            return False

    config = Config(
        parallel=ParallelConfig(pipeline_model_parallel_size=4, pipeline_schedule=name),
        batch=BatchConfig(micro_batch_size=1, global_batch_size=4),
        world_size=4,
    )
    for count in range(1, 25):
        assert takes(count) == takes(_kind(config, count)[0])


@pytest.mark.parametrize(
    ("start", "increment", "samples", "final"), [(16, 16, 5859375, 1536), (4, 2, 50, 16), (8, 8, 0, 8), (2, 3, 7, 11)]
)
def test_a_ramp_is_that_of_megatron_lm(start, increment, samples, final):
    """RampupBatchsizeNumMicroBatchesCalculator.update of Megatron-LM core 0.9."""
    sizes = BatchSizes.of(BatchConfig(rampup_batch_size=(start, increment, samples), global_batch_size=final), 1)
    per_increment = samples / max(1, (final - start) // increment)
    for consumed in {*range(0, 2 * samples, max(1, samples // 997)), samples, samples + 1}:
        if consumed > samples or per_increment == 0:
            expected = final
        else:
            expected = start + int(consumed / per_increment) * increment
        assert sizes.at(consumed) == expected, consumed


def test_steps_are_counted_in_tokens_with_suffixes():
    text = "0:16 2.4B:320 4.8B:624,7.2b:928"
    sizes = BatchSizes.of(BatchConfig(step_batch_size_schedule=text, seq_length=2048), 1)
    assert sizes.steps == ((0, 16), (1171875, 320), (2343750, 624), (3515625, 928))
    assert [sizes.at(n) for n in (0, 1171874, 1171875, 10**9)] == [16, 16, 320, 928]


def test_iterations_and_samples_are_those_of_a_walk():
    sizes = BatchSizes(((0, 4), (10, 6), (17, 50), (20, 8)))
    walk = [0]
    while walk[-1] < 200:
        walk.append(walk[-1] + sizes.at(walk[-1]))
    assert [sizes.after(n) for n in range(len(walk))] == walk
    assert [sizes.after(n, walk[2]) for n in range(len(walk) - 2)] == walk[2:]
    for until in range(150):
        assert sizes.iterations(0, until) == max(n for n, total in enumerate(walk) if total <= until)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"rampup_batch_size": (4, 5, 10)}, "16 is not 4 and a multiple of 5 more. Use --rampup-batch-size 6 5 10."),
        ({"rampup_batch_size": (1, 1, 9), "global_batch_size": 10**9}, "has 999,999,999 sizes up to"),
        ({"rampup_batch_size": (4, 4)}, "expected START INCREMENT SAMPLES"),
        ({"step_batch_size_schedule": "0:8 1K:x"}, "1K:x is not TOKENS:SIZE"),
        ({"step_batch_size_schedule": "0:8 1K:" + "9" * 5000}, "9... is not TOKENS:SIZE"),
        ({"step_batch_size_schedule": "0:8 100:32"}, "ends at a batch of 32, but --global-batch-size is 16"),
        ({"step_batch_size_schedule": "5:8 100:16", "seq_length": 1}, "the first begins at 0"),
        (
            {"step_batch_size_schedule": "0:4 80:8", "seq_length": 128},
            "not samples or iterations, and SIZE sequences of 128 tokens",
        ),
    ],
)
def test_flags_that_say_no_size_are_refused(flags, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        BatchSizes.of(BatchConfig(**{"global_batch_size": 16} | flags), 1)


def config(schedule: str = "1f1b", pp: int = 1, **train) -> Config:
    """Batches of 4, 4, 8, 8, 12, 12, 12 sequences in microbatches of 2: 60 samples of 16 tokens."""
    base = short_run.config(STYLES["gpt2"], pp=pp, schedule=schedule)
    given = {
        "step_batch_size_schedule": "0:4 128:8 384:12",
        "global_batch_size": None,
        "train_iters": None,
        "train_samples": 60,
        "lr_warmup_iters": 0,
        "lr_decay_style": "constant",
    }
    return replace(base.with_fields(**given | train), log=LogConfig(log_interval=1))


def run(config: Config, mesh: ProcessMesh | None = None) -> list[tuple[str, ...]]:
    """(iteration, samples, batch, loss, norm) of each line, to the last bit that steps know."""
    done = Training(config, mesh or ProcessMesh.single(), gpt_provider, forward_step, DATA, 126, time.monotonic())
    told: list[tuple[str, ...]] = []
    last = done.run.progress.last_iteration(config)
    while done.run.progress.iteration < last:
        result = done.driver.whole()
        progress = done.run.progress
        told.append((progress.iteration, progress.consumed_train_samples, result.batch, result.losses["lm loss"].hex()))
    if config.checkpoint.save:
        done.saving.save()
    return told


DATA = Datasets(short_run.datasets().train, None, None)


@cache
def whole() -> list[tuple[str, ...]]:
    return run(config())


def test_a_growing_batch_has_the_bits_of_runs_by_hand_one_size_after_the_other(tmp_path):
    """Dropout on: random streams follow the samples, wherever a step begins."""
    told = whole()
    assert [line[:3] for line in told] == [
        (1, 4, 4), (2, 8, 4), (3, 16, 8), (4, 24, 8), (5, 36, 12), (6, 48, 12), (7, 60, 12)
    ]  # fmt: skip
    by_hand: list[tuple[str, ...]] = []
    for number, (batch, until) in enumerate(((4, 8), (8, 24), (12, 60))):
        flags = CheckpointConfig(
            save=str(tmp_path / f"{number}"),
            save_interval=100,
            load=str(tmp_path / f"{number - 1}") if number else None,
            override_on_load=("global_batch_size",),
        )
        constant = {"step_batch_size_schedule": None, "global_batch_size": batch, "train_samples": until}
        part = config(**constant, lr_decay_samples=60, override_opt_param_scheduler=True)
        by_hand += run(replace(part, checkpoint=flags))
    assert told == by_hand


def test_resume_within_the_ramp_is_exact(tmp_path):
    first = run(replace(config(train_samples=24), checkpoint=CheckpointConfig(save=str(tmp_path), save_interval=1)))
    rest = config(override_opt_param_scheduler=True)
    assert first + run(replace(rest, checkpoint=CheckpointConfig(load=str(tmp_path)))) == whole()


THREE = {"step_batch_size_schedule": "0:8 128:12 320:16", "train_samples": 52}


@cache
def alone() -> list[tuple[str, ...]]:
    return run(config(**THREE))


# Tables of a chain that turns, and of a search; scripts/nightly.sh takes two more.
WITH_TABLES = ["zb-v", "zb-auto", *["zb-h1", "dualpipe-v"] * bool(os.environ.get("MEGAPIPE_NIGHTLY"))]


@pytest.mark.parametrize("schedule", WITH_TABLES)
def test_each_size_has_a_table_of_its_own(schedule):
    """The same losses on two pipeline ranks as on one, over three tables."""
    both = run_threads(lambda mesh: run(config(schedule, pp=2, **THREE), mesh), pp=2, timeout_s=60)
    assert both == [alone(), alone()]


def test_the_log_names_the_batch_and_evaluations_have_their_own(capsys):
    base = config(train_samples=16)
    data = replace(base.data, eval_interval=1, eval_iters=2, eval_global_batch_size=6, eval_micro_batch_size=3)
    parts = Datasets(DATA.train, DATA.train, None)
    asked, one = replace(base, data=data), ProcessMesh.single()
    done = Training(asked, one, gpt_provider, forward_step, parts, 126, time.monotonic())
    done.train()
    out = capsys.readouterr().out
    assert re.findall(r"consumed samples: +(\d+) .* global batch size: +(\d+) \|", out) == [
        ("4", "4"), ("8", "4"), ("16", "8")
    ]  # fmt: skip
    assert done.run.progress.consumed_valid_samples == 4 * 2 * 6


def test_every_size_is_checked_before_the_run():
    sizes = {"rampup_batch_size": (4, 1, 10), "global_batch_size": 12, "step_batch_size_schedule": None}
    problems = flag_problems(config("dualpipe-v", pp=2, **sizes))
    assert any(text.startswith("--global-batch-size 5 is not divisible") for text in problems)
