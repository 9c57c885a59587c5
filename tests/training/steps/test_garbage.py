"""Python's collector: left alone, or run on all ranks at once (--manual-gc)."""

import gc
from dataclasses import replace

import pytest
import short_run
from tiny import STYLES

from megapipe.config import Config
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.models.provider import gpt_provider
from megapipe.training.pretrain import pretrain


@pytest.mark.parametrize(
    ("flags", "collections"),
    [
        ({}, [(1, 2)]),
        ({"manual_gc": True}, [(1, 2), (2, 2), (2, 0)]),
        (
            {"manual_gc": True, "manual_gc_interval": 2, "no_manual_gc_eval": True},
            [(1, 2), (2, 2), (4, 2)],
        ),
    ],
)
def test_garbage_is_collected_after_the_first_step_and_with_manual_gc_where_the_flags_say(flags, collections):
    base = short_run.config(STYLES["gpt2"])
    config = replace(
        base.with_fields(train_iters=4, **flags),
        data=replace(base.data, eval_iters=1, eval_interval=2, start_eval_at_iter=2),
    )
    training, seen = short_run.run_of(ProcessMesh.single(), config), []
    look, training.evaluation.finish = training.evaluation.look, lambda: None

    def look_once() -> None:
        if training.run.progress.iteration == 2:
            look()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append((training.run.progress.iteration, info["generation"]))

    training.evaluation.look, training.evaluation._valid = look_once, training.driver._batches_at
    if not flags:
        gc.disable()  # else it may collect in between
    gc.callbacks.append(note)
    try:
        training.train()
        assert not gc.isenabled()
    finally:
        gc.callbacks.remove(note)
        gc.enable()
        gc.unfreeze()
    assert seen == [(0, 2), *collections]


@pytest.mark.parametrize("collects", [False, True])
def test_the_collector_is_as_its_caller_had_it_after_a_run_or_a_start_that_is_refused(collects):
    """It was turned on, whatever the caller had; and a refused start unfroze what the caller had frozen."""
    flags = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8 --manual-gc "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 15 --micro-batch-size 1 --global-batch-size 1 "
        "--train-iters 1 --lr 1e-3 --eval-iters 0 --split 1,0,99"
    )

    def refused(config, span, tp):
        raise ConfigError("no model")

    try:
        (gc.enable if collects else gc.disable)()
        gc.freeze()
        frozen = gc.get_freeze_count()
        with pytest.raises(ConfigError, match="no model"):
            pretrain(parse(Config, flags.split()), refused)
        assert gc.isenabled() == collects
        assert gc.get_freeze_count() > frozen // 2  # it may have let go of some
        pretrain(parse(Config, flags.split()), gpt_provider)
        assert gc.isenabled() == collects
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
