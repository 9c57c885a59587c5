"""What every schedule, layout and setting must not change: the training of a tiny GPT, compared with one process.

Shared by the equality tests and tools/fuzz_equivalence.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from megapipe.distributed.layout import layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.gpt import WORD_EMBEDDINGS
from megapipe.models.provider import gpt_provider
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.partition import spans
from megapipe.schedule import Schedule, build, from_csv, from_json, to_csv, to_json
from megapipe.tensor_parallel.rng import initialize
from megapipe.training.step import Pipeline, StepResult, evaluate, train_step
from pretrain_gpt import forward_step

STEPS, SEQ, VOCAB = 3, 8, 32
STYLES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "ffn_hidden_size": 24,
        "group_query_attention": True,
        "num_query_groups": 2,
        "disable_bias_linear": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full"},
    "uniform-2": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "block-1": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
    "modules": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")},
    "partial": {"recompute_granularity": "full", "num_microbatches_with_partial_activation_checkpoints": 1},
}


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        microbatches: per data-parallel rank.
        chunks: stages per rank where the schedule leaves a choice.
        layers: of each position of the chain; a position may have none.
        p2p: how messages are posted, see pipeline_parallel.transport.
        file: the schedule goes through a "json" or "csv" file first.
        variable: the microbatches differ in length.
        distributed: optimizer state is split over data parallel.
    """

    schedule: str
    pp: int
    microbatches: int
    layers: tuple[int, ...]
    chunks: int | None = None
    tp: int = 1
    dp: int = 1
    style: str = "gpt2"
    tied: bool = True
    recompute: str = "none"
    sequence_parallel: bool = False
    per_token_loss: bool = False
    p2p: str = "plain"
    file: str | None = None
    variable: bool = False
    distributed: bool = False
    dtype: str = "float64"
    steps: int = STEPS

    @property
    def whole(self) -> Case:
        """The same training on one process."""
        return replace(
            self,
            schedule="naive",
            pp=1,
            microbatches=self.microbatches * self.dp,
            layers=(sum(self.layers),),
            chunks=None,
            tp=1,
            dp=1,
            recompute="none",
            sequence_parallel=False,
            p2p="plain",
            file=None,
            distributed=False,
        )

    @property
    def same_bits(self) -> bool:
        """Is every number the sum of the same terms in the same order as in one process?"""
        return self.tp == self.dp == 1 and table(self).placement.num_chains == 1

    @property
    def config(self) -> Config:
        return Config(
            model=ModelConfig(
                num_layers=sum(self.layers),
                hidden_size=16,
                num_attention_heads=4,
                max_position_embeddings=SEQ,
                padded_vocab_size=VOCAB,
                untie_embeddings_and_output_weights=not self.tied,
                sequence_parallel=self.sequence_parallel,
                **STYLES[self.style],
                **RECOMPUTE[self.recompute],
            ),
            parallel=ParallelConfig(
                tensor_model_parallel_size=self.tp,
                pipeline_model_parallel_size=self.pp,
                pipeline_schedule=self.schedule,
                no_overlap_p2p_communication=self.p2p == "batched",
                use_ring_exchange_p2p=self.p2p == "ring",
            ),
            train=TrainConfig(
                micro_batch_size=1,
                global_batch_size=self.microbatches * self.dp,
                seq_length=SEQ,
                train_iters=self.steps,
                lr=1e-2,
                calculate_per_token_loss=self.per_token_loss,
            ),
            data=DataConfig(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1, eod_mask_loss=True),
            world_size=self.tp * self.dp * self.pp,
        )


class Part(NamedTuple):
    """A rank's part of a parameter or its gradient, as saved: split in dimension `dim` over tp."""

    tensor: Tensor
    dim: int | None


class Outcome(NamedTuple):
    """What one rank knows after training.

    Attributes:
        losses: of each step, and of validation after the last.
        gradients: of the first step, reduced, scaled and clipped.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Part]
    weights: dict[str, Part]


def table(case: Case) -> Schedule:
    """The case's schedule. Raises: ScheduleError if there is none for these numbers."""
    return _table(case.schedule, case.pp, case.microbatches, case.chunks, case.file)


@lru_cache(maxsize=256)
def _table(name: str, pp: int, microbatches: int, chunks: int | None, file: str | None) -> Schedule:
    options: dict[str, Any] = {"effort": 0.1} if name == "zb-auto" else {}
    schedule = build(name, pp, microbatches, chunks=chunks, **options)
    if file is None:
        return schedule
    return from_json(to_json(schedule)) if file == "json" else from_csv(to_csv(schedule))


def sample(number: int, variable: bool = False) -> Tensor:
    """[1, s + 1] token ids; s is SEQ, or one of three lengths."""
    length = SEQ - 2 * (number % 3) if variable else SEQ
    return torch.randint(0, VOCAB, (1, length + 1), generator=torch.Generator().manual_seed(number))


class Training:
    """One rank's part of a run, step by step."""

    def __init__(self, mesh: ProcessMesh, case: Case) -> None:
        self.mesh, self.case, self.config = mesh, case, case.config
        schedule = table(case)
        places, dtype = spans(case.layers, schedule.placement), getattr(torch, case.dtype)
        own = schedule.placement.stages_on(mesh.pp.rank)
        self.stages = [gpt_provider(self.config.model, places[s], mesh.tp).to(dtype) for s in own]
        for stage in self.stages:
            initialize(stage, 1, mesh.tp)
        self.pipeline = Pipeline(
            self.config, schedule, self.stages, forward_step, mesh, VOCAB - 1, variable_seq_lengths=case.variable
        )
        self.optimizer = Optimizer(self.stages, self.config.train, mesh, distributed=case.distributed)

    def step(self, number: int) -> StepResult:
        """Train on the samples of a step, counted from 0."""
        consumed = number * self.config.global_batch_size
        return train_step(self.pipeline, self.optimizer, self._at(consumed), consumed, 1e-2)

    def validation_loss(self) -> float:
        """Of a batch that is not trained on."""
        return evaluate(self.pipeline, self._at, 10_000, 1)["lm loss"]

    def gradients(self) -> dict[str, Part]:
        """Of the parameters whose optimizer state is here, or a share of it."""
        reduced = [(b, b.gathered(b.reduced)) for b in self.optimizer.owned]
        return {name: self._part(name, b.view(grads, name)) for b, grads in reduced for name in b.own}

    def weights(self) -> dict[str, Part]:
        """Of all stages here."""
        return {name: self._part(name, param) for name, param in self.optimizer.params.items()}

    def _at(self, consumed: int) -> list[Tensor]:
        dp = self.mesh.dp
        numbers = [consumed + i * dp.size + dp.rank for i in range(self.case.microbatches)]
        return [sample(number, self.case.variable) for number in numbers]

    def _part(self, name: str, tensor: Tensor) -> Part:
        layout = layout_of(self.optimizer.params[name])
        return Part(tensor.detach().clone().view(layout.local(self.mesh.tp.size)), layout.dim)


def train(mesh: ProcessMesh, case: Case) -> Outcome:
    """One rank's part of the whole run."""
    training = Training(mesh, case)
    results = [training.step(0)]
    gradients = training.gradients()
    results += [training.step(n) for n in range(1, case.steps)]
    losses = [*(result.losses["lm loss"] for result in results), training.validation_loss()]
    return Outcome(losses, [result.grad_norm for result in results], gradients, training.weights())


def differences(case: Case, ranks: Sequence[Outcome]) -> list[str]:
    """What is not as in one process, given every rank's outcome in rank order."""
    whole, found = alone(case.whole), []
    for rank, mine in enumerate(ranks):
        for kind in ("losses", "norms"):
            if not _equal(case, torch.tensor(getattr(mine, kind)), torch.tensor(getattr(whole, kind))):
                found.append(f"rank {rank}: {kind} {getattr(mine, kind)}, not {getattr(whole, kind)}")
        for kind in ("gradients", "weights"):
            for name, (tensor, dim) in getattr(mine, kind).items():
                # A tied head on a rank of its own has the embedding's gradient, the sum of both uses.
                wanted = (getattr(whole, kind).get(name) or getattr(whole, kind)[WORD_EMBEDDINGS]).tensor
                wanted = wanted if dim is None else wanted.chunk(case.tp, dim)[rank % case.tp]
                if not _equal(case, tensor, wanted):
                    found.append(f"rank {rank}: {kind} of {name} differ by {(tensor - wanted).abs().max():.3g}")
    owners = Counter(name for mine in ranks for name in mine.gradients)
    found += [
        f"{owners[name]} ranks own {name}, not {case.tp * case.dp}"
        for name in whole.gradients
        if owners[name] != case.tp * case.dp
    ]
    return found


@cache
def alone(case: Case) -> Outcome:
    """A case of one process."""
    return train(ProcessMesh.single(), case)


def _equal(case: Case, a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) if case.same_bits else torch.allclose(a, b, rtol=1e-9, atol=1e-11)
