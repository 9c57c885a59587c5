"""Compare the training of a tiny GPT under every schedule, layout and setting with one process.

Shared by the equality tests and tools/proofs/fuzz_equivalence.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megapipe.distributed.layout import layout_of, whole_name
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.gpt import WORD_EMBEDDINGS
from megapipe.models.layer import compile_layers, name_modules
from megapipe.models.provider import gpt_provider
from megapipe.optim.loss_scale import LossScale
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rule import Rates
from megapipe.partition.spans import spans
from megapipe.tensor_parallel.rng import initialize
from megapipe.training.evaluation import evaluate
from megapipe.training.forward_step import forward_step
from megapipe.training.steps.stages import Stages
from megapipe.training.steps.step import StepResult, train_step, weights_of
from tools.proofs.equivalence_case import EOD, LR, Case, table

# Relative, of what is summed in another order; what Adam makes of a gradient that is noise differs
# altogether.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
SLICES = 1e-12
"""Of the loss of a first step, and of the largest gradient of all, in float64."""
MOVES = 24
"""Of the initial weights of one process by ulps, which show how much becomes of rounding in 16
bits.
"""


class Part(NamedTuple):
    """A rank's part of a parameter or its gradient, as saved: by dimension (i, n), piece i of n
    there.
    """

    tensor: Tensor
    pieces: dict[int, tuple[int, int]]


class Outcome(NamedTuple):
    """The results of training that one rank has.

    Attributes:
        losses: of each step, and of validation after the last; then of each depth of multi-token
            prediction, and the metric "first".
        gradients: of the first step, reduced, scaled and clipped.
        routers: their losses in each step; tokens: of each expert.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Part]
    weights: dict[str, Part]
    routers: list[float]
    tokens: list[dict[int, tuple[int, ...]]]


class Training:
    """One rank's part of a run, step by step."""

    def __init__(self, mesh: ProcessMesh, case: Case) -> None:
        self.mesh, self.case, self.config = mesh, case, case.config
        schedule = table(case)
        places, dtype = spans(case.layers, schedule.placement), getattr(torch, case.dtype)
        own = schedule.placement.stages_on(mesh.pp.rank)
        self.stages = [
            gpt_provider(self.config.model, places[s], mesh.tp).to(mesh.device, dtype) for s in own
        ]
        for stage in self.stages:
            initialize(stage, 1, mesh.tp)
            _move(stage, case.moved)
            if case.modules:
                name_modules(stage)
            if case.compile:
                compile_layers(stage)
        step = case.reporting(forward_step)
        self.pipeline = Stages(self.config, schedule, self.stages, step, mesh, EOD)
        self.pipeline.engine.variable_seq_lengths = case.variable
        self.optimizer = Optimizer(
            self.stages, self.config.optimizer, mesh, **self.config.of_optimizer
        )
        self.scale = LossScale.start(self.config.precision)

    def step(self, number: int) -> StepResult:
        """Train on the samples of a step, counted from 0."""
        consumed = number * self.config.global_batch_size
        scale = self.scale.scale
        result = train_step(
            self.pipeline, self.optimizer, self._at(consumed), consumed, Rates(LR), loss_scale=scale
        )
        self.scale = self.scale.after(result.skipped, self.config.precision)
        return result

    def validation_loss(self) -> float:
        """Return the loss of a batch that is not trained on."""
        self.optimizer.gathers.settle()
        return _loss(evaluate(self.pipeline, self._at, 10_000, 1, weights_of(self.optimizer)))

    def gradients(self) -> dict[str, Part]:
        """Return the gradients of parameters whose optimizer state, or a share of it, is on this
        rank.
        """
        reduced = [(b, b.gathered(b.reduced)) for b in self.optimizer.owned]
        return {
            name: self._part(name, b.view(grads, name)) for b, grads in reduced for name in b.own
        }

    def weights(self) -> dict[str, Part]:
        """Return the weights of all stages on this rank, and routers' biases."""
        biases = {
            f"bias of layer {router.layer}": router.expert_bias
            for router in self.pipeline.routers.own
        }
        whole = {name: Part(x.double().cpu(), {}) for name, x in biases.items() if x is not None}
        with self.optimizer.gathers.whole():
            return {
                name: self._part(name, param) for name, param in self.optimizer.params.items()
            } | whole

    def _at(self, consumed: int) -> list[Tensor]:
        dp, b = self.mesh.dp, self.case.batch
        firsts = [consumed + (i * dp.size + dp.rank) * b for i in range(self.case.microbatches)]
        read = [
            torch.stack([self.case.sample(number) for number in range(first, first + b)])
            for first in firsts
        ]
        # As the loader gives them to a GPU.
        return [x.pin_memory() for x in read] if self.mesh.device.type == "cuda" else read

    def _part(self, name: str, tensor: Tensor) -> Part:
        layout = layout_of(self.optimizer.params[name])
        tp = self.mesh.tp
        return Part(tensor.detach().cpu().clone().view(layout.local(tp)), layout.pieces(tp))


def train(
    mesh: ProcessMesh, case: Case, change: Callable[[Training], None] = lambda training: None
) -> Outcome:
    """One rank's part of the whole run. change: called before the first step."""
    training = Training(mesh, case)
    change(training)
    results = [training.step(0)]
    gradients = training.gradients()
    results += [training.step(n) for n in range(1, case.steps)]
    losses = [*(_loss(result.losses) for result in results), training.validation_loss()]
    losses += [
        loss
        for result in results
        for name, loss in sorted(result.losses.items())
        if name.startswith(("mtp_", "first"))
    ]
    norms = [
        result.grad_norm if math.isfinite(result.grad_norm) else math.inf for result in results
    ]
    routers = [x for result in results for row in result.routed.per_layer.values() for x in row]
    return Outcome(
        losses, norms, gradients, training.weights(), routers, [r.routed.tokens for r in results]
    )


def differences(case: Case, ranks: Sequence[Outcome]) -> list[str]:
    """Return the differences from one process, given every rank's outcome in rank order."""
    whole, found = alone(case.whole), _differences_of_slices(case)
    for rank, mine in enumerate(ranks):
        if mine.tokens != whole.tokens:
            found.append(f"rank {rank}: experts have {mine.tokens}, not {whole.tokens}")
        for kind in ("losses", "norms", "routers"):
            if not _numbers_agree(case, kind, mine, whole):
                found.append(
                    f"rank {rank}: {kind} {getattr(mine, kind)}, not {getattr(whole, kind)}"
                )
        for kind in ("gradients", "weights"):
            agree: Callable[[Case, Tensor, Tensor], bool] = _equal
            if not (case.same_bits or case.dtype == "float64"):
                agree = ROUNDED[kind]
            for name, (tensor, pieces) in getattr(mine, kind).items():
                wanted = part_of_whole(getattr(whole, kind), name, pieces)
                if not agree(case, tensor, wanted):
                    if agree is _gradients_agree and _moves_as_far(case, name, pieces, tensor):
                        continue
                    found.append(
                        f"rank {rank}: {kind} of {name} differ by "
                        f"{(tensor - wanted).abs().max():.3g}"
                    )
    owners = Counter[str]()
    for name in (name for mine in ranks for name in mine.gradients):
        shares = name.partition("/")[2].rstrip("]")  # of the vocabulary
        owners[whole_name(name)] += Fraction(1, int(shares or 1))  # type: ignore[assignment]
    found += [
        f"{owners[name]} ranks own {name}, not {case.tp * case.cp * case.dp}"
        for name in whole.gradients
        if owners[name] != case.tp * case.cp * case.dp
    ]
    return found


def part_of_whole(whole: dict[str, Part], name: str, pieces: dict[int, tuple[int, int]]) -> Tensor:
    """Return one process's tensor of this name, or the piece of it that a rank has."""
    # A tied head on a rank of its own has the embedding's gradient, the sum of both uses.
    found = (whole.get(whole_name(name)) or whole[WORD_EMBEDDINGS]).tensor
    for dim, (i, n) in pieces.items():
        found = found.chunk(n, dim)[i]
    return found


def differing_bits(ranks: Sequence[Outcome], others: Sequence[Outcome]) -> list[str]:
    """Return the numbers that are not bitwise equal in a run of the same layout."""
    found = []
    for rank, (mine, other) in enumerate(zip(ranks, others, strict=True)):
        numbers = ("losses", "norms", "routers")
        differ = [
            kind for kind in numbers if repr(getattr(mine, kind)) != repr(getattr(other, kind))
        ]
        for kind in ("gradients", "weights"):
            a, b = getattr(mine, kind), getattr(other, kind)
            differ += [
                f"{kind} of {name}" for name in a if not _same_bits(a[name].tensor, b[name].tensor)
            ]
        found += [
            f"rank {rank}: {what} have other bits than with weights that live for ever"
            for what in differ
        ]
    return found


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _differences_of_slices(case: Case) -> list[str]:
    """Return the numbers of one process that slices change in float64.

    Each slice decides which tokens are dropped.
    """
    if not case.slices or case.dtype != "float64" or case.experts == "dropping":
        return []
    mine, whole = alone(case.whole), alone(replace(case.whole, slices=(), follows=False))
    found = [
        f"slices change {kind}: {getattr(mine, kind)}, not {getattr(whole, kind)}"
        for kind in ("losses", "norms", "routers")
        if not _numbers_agree(case, kind, mine, whole, TOLERANCE["float64"])
    ]
    # Before Adam makes much of little: of the first step.
    if whole.losses[0] == whole.losses[0] and abs(mine.losses[0] / whole.losses[0] - 1) > SLICES:
        found.append(f"slices change the first loss: {mine.losses[0]}, not {whole.losses[0]}")
    most = max(gradient.abs().max().item() for gradient, _ in whole.gradients.values())
    for name, (gradient, _) in mine.gradients.items():
        if not (gradient - whole.gradients[name].tensor).abs().max() <= SLICES * most < math.inf:
            found.append(f"slices change the gradient of {name}")
    return found


@cache
def alone(case: Case) -> Outcome:
    """A case of one process."""
    return train(ProcessMesh.single(), case)


def _loss(losses: dict[str, float]) -> float:
    """nan where no token counted."""
    return losses.get("lm loss", math.nan)


def _equal(case: Case, a: Tensor, b: Tensor, rtol: float | None = None) -> bool:
    if rtol is None:
        rtol = 0.0 if case.same_bits else TOLERANCE[case.dtype]
    return torch.allclose(a, b, rtol=rtol, atol=rtol / 100, equal_nan=True)


def _numbers_agree(
    case: Case, kind: str, mine: Outcome, whole: Outcome, rtol: float | None = None
) -> bool:
    """Return whether losses or norms agree with one process's.

    In 32 and 16 bits, two runs may lie on both sides of float64, each as far from it as one process
    is. One process is also measured after every initial weight was moved by at most an ulp: Adam's
    steps make much of little, and ten layers of small vectors after RMSNorm double a token's
    gradient each. Norms of one such case, in the third step of one process: 1.09 in float64, 1.24
    in bfloat16, 1.09 to 18.7 in bfloat16 moved so. Norms of another: 1.1127 in float64, 1.1134 in
    float32, 1.1108 to 1.1126 moved so.

    In fp16 a step that overflows in one run alone is no difference where one process moved so does
    both: of one case's 25 draws 7 overflow in the second step, and 18 have norms of 1.4 to 6.6.
    """
    a, b = (torch.tensor(getattr(x, kind), dtype=torch.float64) for x in (mine, whole))
    if case.same_bits or case.dtype == "float64" or _equal(case, a, b, rtol):
        return _equal(case, a, b, rtol)
    exact = torch.tensor(
        getattr(alone(replace(case.whole, dtype="float64")), kind), dtype=torch.float64
    )
    alike = torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)
    off = torch.zeros_like(b)
    finite, overflowed = torch.zeros_like(alike), torch.zeros_like(alike)
    for seed in range(1 + MOVES):
        moved = torch.tensor(
            getattr(alone(replace(case.whole, moved=seed)), kind), dtype=torch.float64
        )
        finite |= moved.isfinite()
        overflowed |= moved.isinf()
        # A draw that overflows says nothing of how far finite ones lie apart.
        off = torch.fmax(off, torch.where(moved.isfinite(), (moved - exact).abs(), 0.0))
        allowed = TOLERANCE[case.dtype] * b.abs() + TOLERANCE[case.dtype] / 100 + 2 * off
        near = a.isfinite() & b.isfinite() & ((a - b).abs() <= allowed)
        either = (a.isinf() | b.isinf()) & finite & overflowed
        if (alike | near | either).all():
            return True
    return False


def _move(stage: nn.Module, seed: int) -> None:
    """Each weight down or up by at most an ulp, or not."""
    if seed:
        dice = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in stage.parameters():
                ways = torch.randint(-1, 2, p.shape, generator=dice).to(p.device)
                p.copy_(p.double() * (1 + ways * torch.finfo(p.dtype).eps / 2))


def _gradients_agree(case: Case, a: Tensor, b: Tensor) -> bool:
    """By their norms; the whole gradient has at most 1. One that overflowed says nothing else."""
    a, b = a.double(), b.double()
    allowed = TOLERANCE[case.dtype] * (b.norm() + 0.05)
    return not b.isfinite().all() or bool((a - b).norm() <= allowed)


def _moves_as_far(
    case: Case, name: str, pieces: dict[int, tuple[int, int]], gradient: Tensor
) -> bool:
    """Return whether one process's gradient moves half as far if weights move by an ulp at most.

    This is asked in 16 bits alone. The backward of a norm divides gradients by its inputs, which
    behind an MLP may be small. In one case of fp16 a gradient on two ranks was up to 0.0039 from
    one process in a weight. The whole gradient of one process moved so lies up to 0.018 away.
    """
    if case.dtype not in ("float16", "bfloat16"):
        return False
    here = part_of_whole(alone(case.whole).gradients, name, pieces).double()
    off = (gradient.double() - here).norm()
    for seed in range(1, 1 + MOVES):
        moved = part_of_whole(alone(replace(case.whole, moved=seed)).gradients, name, pieces)
        if off <= 2 * (moved.double() - here).norm():
            return True
    return False


def _weights_agree(case: Case, a: Tensor, b: Tensor) -> bool:
    """An update of Adam is about the learning rate at most, whatever the gradient."""
    return bool((a.double() - b.double()).abs().max() <= 3 * LR * case.steps)


ROUNDED = {"gradients": _gradients_agree, "weights": _weights_agree}
