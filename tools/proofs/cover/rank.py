"""One rank of a run of a case: the whole of `pretrain`, which writes its numbers at the end."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megapipe.config import Config, ModelConfig
from megapipe.data.build import Datasets
from megapipe.data.gpt_dataset import GPTDataset, MockTokens, build_indices
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import histories, layout_of
from megapipe.models.provider import Provider, gpt_provider
from megapipe.partition.spans import LayerSpan
from megapipe.tensor_parallel import fused_cross_entropy, vocabulary
from megapipe.training import build
from megapipe.training.driver import Driver
from megapipe.training.evaluation import Evaluation
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import Training, pretrain
from megapipe.training.steps.stages import Stages
from megapipe.training.steps.step import StepResult
from tools.proofs.cover.choices import SEQ, VOCAB, Case, config_of
from tools.proofs.equivalence import Part as Part
from tools.proofs.fuzz_post_validation import Spoil

SPOILED_STEP = 3
"""The iteration, counted from 1, whose gradients are multiplied by a factor."""
LARGE = {"fp16": 1e6, "fp8": 1e2, "fp8-tensor": 1e2}
"""How large a spoiled gradient is, by precision; else 1e4.

In fp16 it overflows in every layout. In 8 bits a longer step, which nothing clips, would leave
weights whose products are rounding alone.
"""


BIASES = "biases of routers"
HISTORIES = "largest values of 8 bits"
KEPT_LOGITS = SEQ * VOCAB // 2
"""Logits of a microbatch that a head may keep for its backward; more are computed again, as those
of a real model are.

So few that the sizes of a case decide: some keep them, some do not.
"""
BLOCK_ROWS = 8
"""Rows of the vocabulary in a block of the head, so that a case has several."""


@dataclass
class Numbers:
    """The numbers of a run that one rank knows.

    Attributes:
        steps: of each iteration its losses, gradient norm and whether it was skipped.
        evaluations: the losses of each evaluation.
        tensors: by kind ("weights", BIASES, HISTORIES, or a kind of optimizer state) the parts of
            this rank.
    """

    steps: dict[int, dict[str, Any]]
    evaluations: list[dict[str, float]]
    tensors: dict[str, dict[str, Part]]


class Narrow:
    """A data set whose token ids are int32."""

    def __init__(self, items: GPTDataset) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, sample: int) -> NDArray[np.int32]:
        return self.items[sample].astype(np.int32)


def run_rank(case: Case, layers: int, more: Sequence[str], to: Path) -> None:
    """Train one rank's part of a case and write its Numbers to a file.

    Args:
        layers: of the model.
        more: flags of this part of the run: where it begins, ends and saves.
    """
    _keep_few_logits()
    numbers = Numbers({}, [], {})
    now = [0]
    _write_down(numbers, now, to)

    def step(data: Iterator[Any] | None, model: nn.Module) -> tuple[Tensor, Any]:
        output, loss_func = forward_step(data, model)
        factors = {"no": 1.0, "large": LARGE.get(case["precision"], 1e4), "infinite": math.inf}
        factor = factors[case["spoiled"]]
        if loss_func is None or factor == 1.0 or now[0] != SPOILED_STEP or not model.training:
            return output, loss_func

        def spoiled(output: Tensor) -> tuple[Tensor, ...]:
            loss, *more = loss_func(output)
            return Spoil.apply(loss, factor), *more  # type: ignore[no-untyped-call]

        return output, spoiled

    def datasets(config: Config, tokenizer: object) -> Datasets:
        return _datasets(narrow=case["tokens"] == "int32")

    pretrain(config_of(case, layers, more), _provider(case), step, datasets)


def _keep_few_logits() -> None:
    build.most_kept = lambda *_: KEPT_LOGITS  # type: ignore[attr-defined]
    vocabulary.KEPT_ELEMENTS = KEPT_LOGITS  # type: ignore[attr-defined]
    fused_cross_entropy._step = lambda rows: BLOCK_ROWS


def _provider(case: Case) -> Provider:
    """Return the provider of a case, which makes stages in float64 where the case says so."""
    wide = case["precision"] == "float64"

    def ours(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
        stage = gpt_provider(config, span, tp)
        return stage.double() if wide else stage

    def in_megatrons_shape(
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
        config: ModelConfig,
        span: LayerSpan,
        tp: Axis,
    ) -> nn.Module:
        return ours(config, replace(span, embedding=pre_process, loss=post_process), tp)

    return ours if case["provider"] == "ours" else in_megatrons_shape


@cache
def _datasets(*, narrow: bool) -> Datasets:
    source = MockTokens(VOCAB, VOCAB - 1)

    def part(first: int, last: int) -> Any:
        documents = np.arange(first, last)
        items = GPTDataset(
            source, build_indices(source.lengths, documents, SEQ, 200, 1234), SEQ, VOCAB, documents
        )
        return Narrow(items) if narrow else items

    return Datasets(part(0, 100), part(100, 150), part(150, 200))


def _write_down(numbers: Numbers, now: list[int], to: Path) -> None:
    """Have this process's run write its numbers down. A callback would do, but it makes each update
    wait.
    """
    ended, run, train = Driver.ended, Stages.run, Training.train

    def at_end(self: Driver, result: StepResult) -> None:
        ended(self, result)
        numbers.steps[self.run.progress.iteration] = {
            **result.losses,
            **{f"routed {name}": value for name, value in result.routed.losses.items()},
            "norm": result.grad_norm,
            "skipped": float(result.skipped),
            "next scale": self.run.progress.loss_scale.scale,
        }

    def numbered(self: Stages, *args: Any, iteration: int | None = None, **how: Any) -> Any:
        now[0] = iteration or 0
        return run(self, *args, iteration=iteration, **how)

    module: Any = sys.modules[Evaluation.__module__]
    evaluate = module.evaluate

    def evaluated(*args: Any) -> dict[str, float]:
        now[0] = 0
        losses: dict[str, float] = evaluate(*args)
        numbers.evaluations.append(losses)
        return losses

    def to_the_end(self: Training) -> int:
        code = train(self)
        numbers.tensors.update(_tensors(self))
        torch.save(numbers, to)
        return code

    Driver.ended = at_end  # type: ignore[method-assign]
    Stages.run = numbered  # type: ignore[method-assign]
    Training.train = to_the_end  # type: ignore[method-assign]
    module.evaluate = evaluated


def _tensors(training: Training) -> dict[str, dict[str, Part]]:
    run = training.run
    tp = run.mesh.tp

    def part(name: str, tensor: Tensor) -> Part:
        layout = layout_of(run.optimizer.params[name])
        return Part(tensor.detach().clone().view(layout.local(tp)), layout.pieces(tp))

    with run.optimizer.gathers.whole():
        found = {"weights": {name: part(name, x) for name, x in run.optimizer.params.items()}}
    biases = {f"layer {router.layer}": router.expert_bias for router in run.stages.routers.own}
    found[BIASES] = {name: Part(x.clone(), {}) for name, x in biases.items() if x is not None}
    remembered = (named for module in run.stages.modules for named in histories(module))
    found[HISTORIES] = {name: Part(x.clone(), {}) for name, x in remembered}
    state = run.optimizer.state()
    return found | {
        kind: {name: part(name, x) for name, x in of.items()} for kind, of in state.items()
    }
