"""Plans of a small GPT from a line of flags, and what is wrong with such a line."""

from dataclasses import replace

import pytest

from megapipe.checks.run import validate
from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.plan import make_plan

SMALL = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 1 --train-iters 1 --lr 1e-3 "
)


def config(flags: str, processes: int = 1, microbatches: int = 8) -> Config:
    parsed = parse(Config, f"{SMALL} --global-batch-size {microbatches} {flags}".split())
    return replace(parsed, model=replace(parsed.model, padded_vocab_size=128), world_size=processes)


def problems(flags: str, processes: int) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(config(flags, processes), has_cuda=False)
    return "\n".join(caught.value.problems)


def stages(flags: str, ranks: int) -> tuple[str, tuple[int, ...]]:
    """Name of the schedule and layers of each stage that flags lead to."""
    given = config(f"--pipeline-model-parallel-size {ranks} {flags}", ranks)
    validate(given, has_cuda=False)
    plan = make_plan(given)
    return plan.schedule.name, plan.counts
