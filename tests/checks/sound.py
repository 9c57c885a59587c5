"""A configuration that is sound, and what is wrong once flags are added to it: what the tests of checks share."""

from dataclasses import replace

import pytest

from megapipe.checks.run import validate
from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse

SOUND = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --max-position-embeddings 32 --seq-length 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 20 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000"
)


def config(flags: str = "", world_size: int = 1) -> Config:
    return replace(parse(Config, f"{SOUND} {flags}".split()), world_size=world_size)


def problems(flags: str, world_size: int = 1, has_cuda: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(config(flags, world_size), has_cuda=has_cuda)
    return list(caught.value.problems)


def problem(flags: str, world_size: int = 1, has_cuda: bool = False) -> str:
    (only,) = problems(flags, world_size, has_cuda)
    return only


def without(*names: str) -> Config:
    flags = SOUND.split(" --")
    kept = [f for f in flags if f.removeprefix("--").split()[0] not in names]
    return parse(Config, " --".join(kept).split())
