"""Twenty steps of a tiny model in training, on one process or on ranks that are threads."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import cache, partial

from tiny import STYLES

from megapipe.config import BatchConfig, Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megapipe.data.build import Datasets, build_datasets
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.provider import gpt_provider
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.training.forward_step import forward_step
from megapipe.training.hooks import NONE, Hooks
from megapipe.training.pretrain import Training

STEPS = 20
SPLIT_STEPS = STEPS if os.environ.get("MEGAPIPE_NIGHTLY") else 3
"""Of ranks, whose numbers are compared with one process's: scripts/nightly.sh goes on to the last."""


def config(model: ModelConfig, *, tp: int = 1, dp: int = 1, pp: int = 1, schedule: str = "1f1b", **fields) -> Config:
    """A run of 20 steps with 4 microbatches of 2 sequences."""
    made = Config(
        model=replace(model, max_position_embeddings=16, padded_vocab_size=128),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, pipeline_schedule=schedule
        ),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=8, seq_length=16, train_iters=STEPS),
        optimizer=OptimizerConfig(lr=3e-3, lr_warmup_iters=2),
        data=DataConfig(
            mock_data=True, tokenizer_type="NullTokenizer", vocab_size=127, num_workers=0, eval_iters=0, split="1,0,99"
        ),
        world_size=tp * dp * pp,
    )
    return made.with_fields(**fields)


@cache
def datasets() -> Datasets:
    """Those of every `config` above: a hundredth of the mock tokens, all of which take a second to index."""
    any_config = config(STYLES["gpt2"])
    return build_datasets(any_config, build_tokenizer(any_config.data))


def run_of(mesh: ProcessMesh, config: Config, hooks: Hooks = NONE) -> Training:
    """A run that is ready for its first step."""
    eod = build_tokenizer(config.data).eod
    return Training(config, mesh, gpt_provider, forward_step, datasets(), eod, time.monotonic(), hooks=hooks)


def train(mesh: ProcessMesh, config: Config, steps: int = STEPS) -> list[tuple[float, float]]:
    """Loss and gradient norm of each of the first steps."""
    training = run_of(mesh, config)
    return [(result.losses["lm loss"], result.grad_norm) for result in (training.driver.whole() for _ in range(steps))]


@cache
def _alone(style: str, **train_flags) -> tuple[Training, list[tuple[float, float]]]:
    return run_of(ProcessMesh.single(), config(STYLES[style], **train_flags)), []


def alone(style: str, steps: int = STEPS, **train_flags) -> list[tuple[float, float]]:
    """`train` on one process; a run that is asked again goes on from where it stands."""
    training, done = _alone(style, **train_flags)
    while len(done) < steps:
        result = training.driver.whole()
        done.append((result.losses["lm loss"], result.grad_norm))
    return done[:steps]


def split(style: str, **layout) -> list[list[tuple[float, float]]]:
    datasets()  # before the threads would each make them
    sizes = {axis: layout.get(axis, 1) for axis in ("tp", "dp", "pp")}
    body = partial(train, config=config(STYLES[style], **layout), steps=SPLIT_STEPS)
    return run_threads(body, **sizes, timeout_s=60)
