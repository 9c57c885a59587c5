"""Draw runs and compare --enable-optimizer-post-validation with the barrier, to the bit.

    python tools/proofs/fuzz_post_validation.py --cases 300 --seed 0

A case trains a tiny GPT for thirty steps, ranks as threads over gloo, with gradients that are
clipped, overflow, or are not finite on one rank, at steps drawn in runs of up to three, with
evaluations and saves between. Losses, norms, loss scales, and the weights and moments of every save
and of the end must be the same.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

# A fresh clone runs it before anything is installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from torch import Tensor, nn

from megapipe.config import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
)
from megapipe.data.build import Datasets
from megapipe.data.gpt_dataset import GPTDataset, MockTokens, build_indices
from megapipe.distributed.mesh import ProcessMesh
from megapipe.flags import stop
from megapipe.flags.parse import parse
from megapipe.models.provider import gpt_provider
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import SCHEDULES, ScheduleError, build, entry_of
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import Training
from megapipe.training.steps.step import StepResult
from tools.proofs.shrink import Draws, Fuzzer

STEPS, VOCAB = 30, 32


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        bad: (step, what its gradient is multiplied by on rank `where`).
        layers: of each stage.
        buckets: --ddp-num-buckets.
        clip: --clip-grad; the norm lies between 0.5 and 2 mostly.
    """

    schedule: str
    pp: int
    microbatches: int
    tp: int = 1
    dp: int = 1
    distributed: bool = False
    overlap: bool = False
    layers: int = 1
    buckets: int | None = None
    precision: str = "float32"
    tied: bool = True
    clip: float = 1.0
    bad: tuple[tuple[int, float], ...] = ()
    where: int = 0
    steps: int = STEPS
    after: int = 0
    evaluates: int = 0
    saves: int = 0
    optimizer: str = "adam"

    def config(self, *, late: bool) -> Config:
        """late: with post-validation."""
        chunks = build(
            self.schedule, self.pp, self.microbatches, **_effort(self.schedule)
        ).placement.chain
        return Config(
            model=ModelConfig(
                num_layers=self.layers * chunks,
                hidden_size=16,
                num_attention_heads=2,
                max_position_embeddings=8,
                padded_vocab_size=VOCAB,
                untie_embeddings_and_output_weights=not self.tied,
            ),
            parallel=ParallelConfig(
                tensor_model_parallel_size=self.tp,
                pipeline_model_parallel_size=self.pp,
                pipeline_schedule=self.schedule,
                use_distributed_optimizer=self.distributed,
                overlap_grad_reduce=self.overlap,
                overlap_param_gather=self.overlap and self.distributed,
                ddp_num_buckets=self.buckets,
                enable_optimizer_post_validation=late,
                post_validation_after=self.after,
            ),
            batch=BatchConfig(
                micro_batch_size=1,
                global_batch_size=self.microbatches * self.dp,
                seq_length=8,
                train_iters=self.steps,
            ),
            optimizer=OptimizerConfig(
                lr=3e-3, lr_warmup_iters=3, clip_grad=self.clip, optimizer=self.optimizer
            ),
            precision=PrecisionConfig(
                bf16=self.precision == "bf16",
                fp16=self.precision == "fp16",
                initial_loss_scale=2.0**12,
                loss_scale_window=4,
                hysteresis=1,
            ),
            guards=GuardConfig(
                no_check_for_nan_in_loss_and_grad=True, max_bad_iterations_in_a_row=self.steps + 1
            ),
            data=DataConfig(
                mock_data=True,
                tokenizer_type="NullTokenizer",
                vocab_size=VOCAB - 1,
                num_workers=0,
                eval_interval=self.evaluates or None,
                eval_iters=1 if self.evaluates else 0,
            ),
            checkpoint=CheckpointConfig(save_interval=self.saves or None),
            world_size=self.tp * self.dp * self.pp,
        )


class Spoil(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


@dataclass(frozen=True)
class Outcome:
    """The results that a rank has at the end."""

    results: list[StepResult]
    scales: list[float]
    tensors: dict[str, Tensor]


def train(mesh: ProcessMesh, case: Case, late: bool) -> Outcome:
    """One rank's part of a run."""
    config, results, scales = case.config(late=late), list[StepResult](), list[float]()
    bad, step = dict(case.bad) if mesh.world.rank == case.where else {}, [0]

    def spoiled(data: Any, model: nn.Module) -> tuple[Tensor, Any]:
        output, loss_func = forward_step(data, model)
        return _spoil(output, bad.get(step[0], 1.0) if model.training else 1.0), loss_func

    training = Training(
        config, mesh, gpt_provider, spoiled, made_datasets(), VOCAB - 1, time.monotonic()
    )
    run, driver, saving = training.run, training.driver, training.saving
    passes, told, tensors = run.stages.run, driver.ended, dict[str, Tensor]()

    def numbered(batches: Any, consumed: int, **how: Any) -> Any:
        step[0] = consumed // config.global_batch_size
        return passes(batches, consumed, **how)

    def ended(result: StepResult) -> None:
        results.append(result)
        scales.append(run.progress.loss_scale.scale)
        told(result)

    def save(**_: Any) -> None:  # ranks that are threads cannot
        state = run.optimizer.state() | {"weights": run.optimizer.params}
        saving.last = saving.begun = n = run.progress.iteration
        with run.optimizer.gathers.whole():
            for kind, of in state.items():
                tensors.update(
                    {f"{kind} {name} at {n}": x.detach().clone() for name, x in of.items()}
                )

    run.stages.run = numbered  # type: ignore[method-assign, assignment]
    driver.ended = ended  # type: ignore[method-assign]
    saving.save = save  # type: ignore[method-assign]
    training.train()
    save()
    return Outcome(results, scales, tensors)


def run_case(case: Case) -> tuple[list[str], int, int]:
    """The differences of a case, and how many steps did not wait and were undone."""
    made_datasets()
    sizes: dict[str, Any] = {"tp": case.tp, "dp": case.dp, "pp": case.pp}
    with contextlib.redirect_stdout(io.StringIO()):
        plain, late = (
            run_threads(partial(train, case=case, late=late), **sizes, timeout_s=120)
            for late in (False, True)
        )
    late_steps, undone = (
        sum(getattr(result, name) for result in late[0].results) for name in ("guessed", "undone")
    )
    for outcome in late:
        outcome.results[:] = [
            replace(result, guessed=False, undone=False) for result in outcome.results
        ]
    return differences(plain, late), late_steps, undone


def differences(ones: Sequence[Outcome], others: Sequence[Outcome]) -> list[str]:
    """Return the numbers of every rank that are not bitwise equal."""
    found = []
    for rank, (a, b) in enumerate(zip(ones, others, strict=True)):
        for what in ("results", "scales"):
            pairs = zip(getattr(a, what), getattr(b, what), strict=True)
            found += [
                f"rank {rank}: {what} {n}: {x}, {y}"
                for n, (x, y) in enumerate(pairs)
                if repr(x) != repr(y)
            ][:3]
        same = (
            torch.equal(x.nan_to_num(), b.tensors[name].nan_to_num())
            for name, x in a.tensors.items()
        )
        found += [
            f"rank {rank}: {name} differs"
            for name, equal in zip(a.tensors, same, strict=True)
            if not equal
        ][:3]
    return found


def draw(rng: random.Random) -> Case:
    """A case that can be built, of at most 8 ranks."""
    while True:
        pp, (tp, dp) = (
            rng.choice((1, 2, 2, 2, 3, 4)),
            rng.choice([*[(1, 1)] * 3, *[(1, 2)] * 5, (2, 1), (2, 2)]),
        )
        bad: dict[int, float] = {}
        for _ in range(rng.randint(0, 4)):
            first = rng.choice((0, STEPS - 1, *range(STEPS)))
            for step in range(first, min(STEPS, first + rng.randint(1, 3))):
                bad[step] = rng.choice((1e4, 1e4, math.inf, math.nan, 1e30))
        case = Case(
            schedule=rng.choice(list(SCHEDULES)),
            pp=pp,
            microbatches=rng.choice((1, 2, 2, 3, 4, 6)),
            tp=tp,
            dp=dp,
            distributed=dp > 1 and rng.random() < 0.5,
            overlap=dp > 1 and rng.random() < 0.5,
            layers=(layers := rng.choice((1, 1, 2))),
            buckets=rng.choice((None, layers)),
            precision=rng.choice(("float32", "bf16", "fp16")),
            tied=rng.random() < 0.5,
            clip=rng.choice((1.0, 2.0, 100.0, 100.0, 0.0)),
            bad=tuple(sorted(bad.items())),
            where=rng.randrange(tp * dp * pp),
            after=rng.choice((0, 0, 0, 1, 3)),
            evaluates=rng.choice((0, 0, 7, 10)),
            saves=rng.choice((0, 0, 4, 11)),
            optimizer=rng.choice(("adam", "adam", "adam", "sgd")),
        )
        with contextlib.suppress(ScheduleError):
            table = build(case.schedule, case.pp, case.microbatches, **_effort(case.schedule))
            if tp * dp * pp <= 8 and table.placement.chain <= 8:
                return case


@cache
def made_datasets() -> Datasets:
    """Return the datasets of every case, of a few documents each: all mock data take seconds to
    index.
    """
    source = MockTokens(VOCAB, VOCAB - 1)

    def part(first: int, last: int) -> GPTDataset:
        documents = np.arange(first, last)
        return GPTDataset(
            source, build_indices(source.lengths, documents, 8, 1000, 1234), 8, VOCAB, documents
        )

    return Datasets(part(0, 500), part(500, 600), part(600, 700))


def _effort(name: str) -> dict[str, Any]:
    return {"effort": 0.1} if entry_of(name).searched else {}


_spoil: Any = Spoil.apply


@dataclass(frozen=True)
class Flags(Draws):
    """Draw runs whose optimizer steps before it knows whether all ranks agree."""

    cases: float = 20
    """How many at most."""


def main(argv: Sequence[str]) -> None:
    options = parse(Flags, argv)
    torch.set_num_threads(1)
    late = undone = 0

    def run(case: Case) -> list[str]:
        nonlocal late, undone
        found, more, wrong = run_case(case)
        late, undone = late + more, undone + wrong
        return found

    fuzzer = Fuzzer("post_validation", draw, run)
    fuzzer.prove(options)
    print(
        f"{fuzzer.count} cases, seed {options.seed}, {STEPS} steps: {late} did not wait, {undone} "
        "of them undone"
    )
    print("no bit differs from the run with a barrier")


if __name__ == "__main__":
    stop.run(main)
