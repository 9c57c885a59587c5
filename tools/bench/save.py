"""Measure for how many milliseconds a save blocks training: `python tools/bench/save.py [--layers N
--hidden H] [--saves K]`.

One process trains a GPT on synthetic tokens. The save that waits is the run's first; each later one
is begun in the background after a step, and steps go on until it is complete.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapipe.config import Config
from megapipe.data.build import build_datasets
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.mesh import ProcessMesh
from megapipe.flags.parse import parse, run
from megapipe.models.provider import gpt_provider
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import Training


@dataclass(frozen=True)
class Flags:
    """Measure for how many milliseconds a save blocks training.

    One process trains a GPT on synthetic tokens.
    """

    layers: int = 4
    """Of the model."""
    hidden: int = 256
    """Its width."""
    batch: int = 8
    """Sequences of a step."""
    saves: int = 5
    """Saves in the background that are timed."""


def main(argv: Sequence[str]) -> None:
    """Measure and print a row of a table."""
    given = parse(Flags, argv)
    with tempfile.TemporaryDirectory() as folder:
        trained = _run(given, folder)
        trained.driver.whole()
        waits = _ms(trained.saving.save)
        steps, blocked = [], []
        for _ in range(given.saves):
            steps.append(_ms(trained.driver.whole))
            blocked.append(_ms(trained.saving.save))
            while trained.saving.last != trained.saving.begun:
                steps.append(_ms(trained.driver.whole))
                trained.saving.finish()
        trained.saving.close()
        size = sum(
            path.stat().st_size
            for path in Path(folder, f"iter_{trained.saving.last:07d}").iterdir()
        )
    step, behind = statistics.median(steps), statistics.median(blocked)
    print("| a checkpoint has | step | save that waits | blocked by --async-save | of a step |")
    print(
        f"| {size / 2**20:.0f} MiB | {step:.0f} ms | {waits:.0f} ms | {behind:.1f} ms | "
        f"{behind / step:.1%} |"
    )


def _run(given: Flags, folder: str) -> Training:
    flags = (
        f"--num-layers {given.layers} --hidden-size {given.hidden} --num-attention-heads 4 "
        "--seq-length 256 "
        f"--max-position-embeddings 256 --micro-batch-size {given.batch} --train-iters 1000 --lr "
        "1e-4 --mock-data "
        f"--tokenizer-type NullTokenizer --vocab-size 4095 --split 1,0,0 --save {folder} "
        "--save-interval 1 "
        "--async-save --save-keep-last 2 --log-interval 1000"
    )
    config = parse(Config, flags.split())
    tokenizer = build_tokenizer(config.data)
    model = config.model.padded_vocab(tokenizer.vocab_size)
    config = parse(Config, [*flags.split(), "--padded-vocab-size", str(model)])
    data = build_datasets(config, tokenizer)
    return Training(
        config,
        ProcessMesh.single(),
        gpt_provider,
        forward_step,
        data,
        tokenizer.eod,
        time.monotonic(),
    )


def _ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    run(main)
