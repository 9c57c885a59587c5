"""One rank of a run by itself: the real program, and what other ranks would send is there at once.

Stages, table, executor, optimizer and memory are the run's. Messages arrive as noise of the right shape, collectives
end as if every other rank had what this one has: numbers mean nothing and communication takes no time.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.commands.plan.held_bytes import parts_of
from megapipe.config import CheckpointConfig, Config, LogConfig
from megapipe.data.build import Datasets
from megapipe.distributed.axis import Axis, Pending
from megapipe.distributed.device import pick_device, synchronize
from megapipe.distributed.grid import Grids
from megapipe.distributed.mesh import ProcessMesh, axis_names, build_mesh
from megapipe.models.provider import find_provider, gpt_provider, stage_provider
from megapipe.optim.census import take_census
from megapipe.pipeline_parallel.messages.agreed import dtype_of
from megapipe.pipeline_parallel.messages.transport import Op
from megapipe.plan import Plan
from megapipe.schedule import unpaired
from megapipe.schedule.measured.costs import Ran
from megapipe.training.forward_step import forward_step
from megapipe.training.guards.model import check_ownership, room
from megapipe.training.pretrain import Training

Answers = Sequence[Sequence[Any]]
"""Answers that the ranks of a pipeline give each other once: to each question every rank's."""


@dataclass(frozen=True)
class Rehearsed:
    """The numbers that a rank showed.

    Attributes:
        stages: of the rank.
        steps: the passes of each timed step.
        beside: seconds of a step outside its passes: gradients to zero, norm, update (U).
        parts: bytes by what they are for; on a GPU also `other`, up to the allocator's peak.
        copies: O and L of each timed step, none where the table has none.
    """

    stages: tuple[int, ...]
    steps: list[list[Ran]]
    beside: float
    parts: dict[str, float]
    copies: Sequence[list[Ran]] = ()

    def of(self, step: Sequence[Ran], stages: Sequence[int]) -> list[Ran]:
        """Passes, or copies, of a timed step, as a rank with other numbers for its stages runs them."""
        renamed = dict(zip(self.stages, stages, strict=True))
        return [x._replace(item=x.item._replace(stage=renamed[x.item.stage])) for x in step]

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Alone(Axis):
    """An axis of which one rank is there; the others have what it has. answers: what they say otherwise.

    How many rows they have for each expert is what it has for others, further by as many experts as lie between: so
    many arrive as leave. As its own tokens choose its own experts, 0 to three times as many arrived of a few tokens.
    """

    answers: Answers = ()

    def start_all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        return Pending(x)  # so gradients are too small by a factor, which costs nothing

    def start_all_gather(self, x: Tensor, into: Tensor | None = None) -> Pending:
        if x.dtype == torch.int64 and x.ndim == 2 and len(x) == 1:  # rows for each expert
            at = [rank * x.shape[1] // self.size for rank in range(self.size)]
            return Pending(torch.cat([x.roll(there - at[self.rank], 1) for there in at]))
        return Pending(torch.cat([x] * self.size))

    def start_reduce_scatter(self, x: Tensor, into: Tensor | None = None) -> Pending:
        return Pending(x[: x.shape[0] // self.size].clone())

    def start_shift(self, x: Tensor, channel: int = 0, into: Tensor | None = None) -> Pending:
        return Pending(x.clone() if into is None else into.copy_(x))

    def all_to_all(self, x: Tensor) -> Tensor:
        return x.clone()

    def start_all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Pending:
        arriving = sum(row[self.rank] for row in rows)
        given = x if len(x) else x.new_zeros(1, *x.shape[1:])
        return Pending(torch.cat([given] * max(1, -(-arriving // len(given))))[:arriving].clone())

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def gather_json(self, value: Any) -> list[Any]:
        mine = json.loads(json.dumps(value))
        return next((list(row) for row in self.answers if row[self.rank] == mine), [mine] * self.size)


class _World(Alone):
    """A world over which only numbers are summed, and ranks that are alike agree on where they are."""

    def start_all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        return Pending(x.mul_(self.size) if op == "sum" else x)


class _Asked(Exception):
    """Carries what a rank says to all others."""


class _Asking(Alone):
    def gather_json(self, value: Any) -> list[Any]:
        raise _Asked(json.loads(json.dumps(value)))


def mesh_of(config: Config, plan: Plan, rank: int, device: torch.device, answers: Answers = ()) -> ProcessMesh:
    """The mesh of a rank of the run, without the others. rank: of the world."""
    mesh = build_mesh(
        Grids.of(config.parallel, config.world_size), rank, device, lambda name, sets: None, shares=plan.shares
    )
    axes = {name: getattr(mesh, name) for name in axis_names()}
    alone = {name: (_World if name == "world" else Alone)(**vars(axis)) for name, axis in axes.items()}
    tp = replace(alone["tp"], expert_axes={name: alone[name] for name in mesh.tp.expert_axes})
    changed: dict[str, Any] = {**alone, "pp": replace(alone["pp"], answers=answers), "tp": tp}
    return replace(mesh, **changed)


def answers_of(config: Config, plan: Plan, ranks: Sequence[int]) -> Answers:
    """Answers of each of these ranks when a pipeline is put together; their stages are built without storage.

    ranks: of the world, those of a pipeline.
    """
    return [*zip(*(_answers(config, plan, rank) for rank in ranks), strict=True)]


def _answers(config: Config, plan: Plan, rank: int) -> list[Any]:
    mesh, place = mesh_of(config, plan, rank, torch.device("cpu")), plan.schedule.placement
    mesh = replace(mesh, pp=_Asking(**vars(mesh.pp)))
    own = [plan.spans[stage] for stage in place.stages_on(mesh.pp.rank)]
    provider = stage_provider(_provider(config), own)
    with room(mesh, plan), torch.device("meta"):
        modules = [_typed(config, provider(config.model, span, mesh.tp)) for span in own]
    return [
        _said(lambda: check_ownership(modules, config.model, provider, place, mesh)),
        _said(lambda: take_census(modules, mesh)),
        _said(lambda: dtype_of(modules, mesh.pp)),
    ]


def _said(question: Callable[[], object]) -> Any:
    try:
        question()
    except _Asked as said:
        return said.args[0]
    raise AssertionError("it asks the pipeline")


def _typed(config: Config, module: nn.Module) -> nn.Module:
    """The module as models.build.stage_module makes it."""
    module = module.requires_grad_(False) if config.optimizer.freeze_all_layers else module
    return module.to(torch.bfloat16 if config.precision.bf16 else torch.float16) if config.precision.half else module


def _provider(config: Config) -> Any:
    return find_provider(config.model.model_provider) if config.model.model_provider else gpt_provider


@dataclass(frozen=True)
class _Noise:
    """Samples without end, of any tokens."""

    length: int
    vocab: int

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, sample: int) -> Any:
        return torch.randint(self.vocab, (self.length + 1,)).numpy()


def rehearse_rank(config: Config, plan: Plan, rank: int, answers: Answers, steps: int) -> Rehearsed:
    """Run a rank's part of a few steps and measure it. Costs its memory and its time."""
    training = rank_alone(config, plan, rank, answers)
    return rehearsed(training, [timed_step(training) for _ in range(steps + 1)][1:])


def rehearsed(training: Training, timed: Sequence[tuple[list[Ran], list[Ran], float]]) -> Rehearsed:
    """Numbers of the steps that were timed, and of one more for its memory."""
    beside = median(took - (row[-1].end - row[0].begin) for row, _, took in timed) if timed else 0.0
    own = training.run.plan.schedule.placement.stages_on(training.run.mesh.pp.rank)
    return Rehearsed(own, [x for x, *_ in timed], beside, parts_of(training), [x for _, x, _ in timed])


def rank_alone(config: Config, plan: Plan, rank: int, answers: Answers) -> Training:
    """A run that is ready for its first step, of which no other rank is there."""
    mesh = mesh_of(config, plan, rank, pick_device(config.parallel), answers).activate()
    with (
        open(os.devnull, "w", encoding="utf-8") as quiet,
        contextlib.redirect_stdout(quiet),
        room(mesh, plan),
    ):
        training = run_on(mesh, config, plan)
    training.run.stages.engine.transport.post = delivered  # type: ignore[method-assign]
    return training


def run_on(mesh: ProcessMesh, config: Config, plan: Plan) -> Training:
    """A run on noise in place of data, which neither loads nor saves nor logs."""
    vocab = (config.model.padded_vocab_size or 2) - 1
    config = replace(config, checkpoint=CheckpointConfig(), log=LogConfig())
    config = config.with_fields(num_workers=0, eval_interval=None)
    if config.precision.fp16:  # noise would overflow under a large one, and the update be skipped
        config = config.with_fields(loss_scale=1.0)
    data = Datasets(_Noise(config.batch.sequence, vocab), None, None)
    return Training(config, mesh, _provider(config), forward_step, data, vocab - 1, time.monotonic(), plan=plan)


def delivered(ops: list[Op]) -> Sequence[_There]:
    """Messages that are there at once, in place of `Transport.post`."""
    for op in ops:
        if not op.sends:
            op.tensor.copy_(_noise(op.tensor.shape, op.tensor.device))
    return [_There()] * len(ops)


class _There:
    """A message that has arrived."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        return True


@cache
def _noise(shape: torch.Size, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device) * 0.01


def timed_step(training: Training) -> tuple[list[Ran], list[Ran], float]:
    """The passes and copies of one step, and seconds of all of it. Pairs run one after the other."""
    schedule, costs = training.run.stages.schedule, training.run.plan.costs
    paired = any(len(step) > 1 for step in schedule.steps())
    if paired:
        training.run.stages.follow(unpaired(schedule), costs)
    synchronize(training.run.mesh.device)
    began = time.perf_counter()
    training.driver.whole()
    synchronize(training.run.mesh.device)
    took = time.perf_counter() - began
    watch = training.run.stages.stopwatch
    ran, copies = watch.ran(training.run.mesh.pp.rank), watch.copied()
    if paired:
        training.run.stages.follow(schedule, costs)
    return ran, copies, took
