"""Run one rank of a run by itself: the real program, without the other ranks.

Stages, table, executor, optimizer and memory are the run's. Messages arrive at once, as noise of
the right shape. Collectives end at once, as if every other rank had the same data. So the numbers
mean nothing, and communication takes no time.
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
from megapipe.schedule.measured.costs import MeasuredPass
from megapipe.training.forward_step import forward_step
from megapipe.training.guards.model import check_ownership, room
from megapipe.training.pretrain import Training

Answers = Sequence[Sequence[Any]]
"""What the ranks of a pipeline tell each other before the first step: [question][rank]."""


@dataclass(frozen=True)
class Rehearsed:
    """The measurements of a rank that ran alone.

    `of` returns passes of this rank with the stage numbers of another rank that has equal work.
    `peak` is the sum of `parts`.

    Attributes:
        stages: the stages of the rank.
        steps: for each timed step, its passes with their times.
        outside: seconds of a step outside the passes: zeroing gradients, norm, update.
        parts: {purpose, such as "weights": bytes at the peak of memory}.
        copies: the copies to and from the host (O and L) of each timed step; empty if the table has
            none.
    """

    stages: tuple[int, ...]
    steps: list[list[MeasuredPass]]
    outside: float
    parts: dict[str, float]
    copies: Sequence[list[MeasuredPass]] = ()

    def of(self, step: Sequence[MeasuredPass], stages: Sequence[int]) -> list[MeasuredPass]:
        """Return passes or copies with stage numbers as if another rank had run them.

        Args:
            step: passes or copies of a step of this rank.
            stages: the stages of the other rank, in the order of `self.stages`.
        """
        renamed = dict(zip(self.stages, stages, strict=True))
        return [x._replace(item=x.item._replace(stage=renamed[x.item.stage])) for x in step]

    @property
    def peak(self) -> float:
        """Return the bytes at the peak."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Alone(Axis):
    """A mesh axis with one real rank: collectives act as if all other ranks had the same data.

    The counts of tokens for each expert are an exception: another rank has this rank's counts,
    shifted by the number of experts between the two ranks. So each rank receives as many tokens as
    it sends. With equal counts, a rank would receive up to three times as many, or none.

    Attributes:
        answers: for each call of `gather_json` before the first step, the values of all ranks.
    """

    answers: Answers = ()

    def start_all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        # Gradients are too small by a factor. That costs nothing.
        return Pending(x)

    # In an all-gather and a reduce-scatter, this rank's part stands for the parts of all.
    def start_all_gather(self, x: Tensor, into: Tensor | None = None) -> Pending:
        # Only the dispatcher of experts gathers such a row: its counts for each expert.
        if x.dtype == torch.int64 and x.ndim == 2 and len(x) == 1:
            at = [rank * x.shape[1] // self.size for rank in range(self.size)]
            return Pending(torch.cat([x.roll(first - at[self.rank], 1) for first in at]))
        return Pending(torch.cat([x] * self.size))

    def start_reduce_scatter(self, x: Tensor, into: Tensor | None = None) -> Pending:
        return Pending(x[: x.shape[0] // self.size].clone())

    def start_shift(self, x: Tensor, channel: int = 0, into: Tensor | None = None) -> Pending:
        return Pending(x.clone() if into is None else into.copy_(x))

    # A new tensor, as the real collective would return.
    def all_to_all(self, x: Tensor) -> Tensor:
        return x.clone()

    def start_all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Pending:
        arriving = sum(row[self.rank] for row in rows)
        given = x
        # A rank without rows of its own may receive some.
        if not len(x):
            given = x.new_zeros(1, *x.shape[1:])
        # This rank's own rows, repeated until there are as many as would arrive.
        repeats = max(1, -(-arriving // len(given)))
        return Pending(torch.cat([given] * repeats)[:arriving].clone())

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def gather_json(self, value: Any) -> list[Any]:
        # Through JSON, as a real gather would send it: tuples become lists.
        mine = json.loads(json.dumps(value))
        # The question is known by this rank's own answer to it.
        for row in self.answers:
            if row[self.rank] == mine:
                return list(row)
        return [mine] * self.size


class _World(Alone):
    """The axis of all processes, with one real rank. An all-reduce multiplies by `size`."""

    def start_all_reduce(self, x: Tensor, op: str = "sum") -> Pending:
        return Pending(x.mul_(self.size) if op == "sum" else x)


class _Asked(Exception):
    """Raised by the first gather of an `_Asking`, with the value that the rank would have sent."""


class _Asking(Alone):
    """An axis of this rank alone, whose first gather raises `_Asked` with this rank's value."""

    def gather_json(self, value: Any) -> list[Any]:
        raise _Asked(json.loads(json.dumps(value)))


def mesh_of(
    config: Config, plan: Plan, rank: int, device: torch.device, answers: Answers = ()
) -> ProcessMesh:
    """Return the mesh of one rank of the run, whose collectives need no other ranks.

    Args:
        rank: the global rank.
        answers: results of `gather_json` over the pipeline, from `answers_of`; () if it is not
            called.
    """
    # The process groups are left out, as there are no other ranks to join them.
    mesh = build_mesh(
        Grids.of(config.parallel, config.world_size),
        rank,
        device,
        lambda name, sets: None,
        shares=plan.shares,
    )
    alone = {}
    for name in axis_names():
        kind = _World if name == "world" else Alone
        alone[name] = kind(**vars(getattr(mesh, name)))
    # The tensor-parallel axis leads to the axes of experts, which must be replaced there too.
    expert_axes = {name: alone[name] for name in mesh.tp.expert_axes}
    changed: dict[str, Any] = dict(alone)
    changed["tp"] = replace(alone["tp"], expert_axes=expert_axes)
    changed["pp"] = replace(alone["pp"], answers=answers)
    return replace(mesh, **changed)


def answers_of(config: Config, plan: Plan, ranks: Sequence[int]) -> Answers:
    """Return the results of each `gather_json` over a pipeline before the first step.

    A lone rank cannot gather, so the values of all ranks are computed here, with each rank's
    modules on the meta device.

    Args:
        ranks: the global ranks of the pipeline.
    Returns: for each call of `gather_json`, the values of all ranks.
    """
    return [*zip(*(_answers(config, plan, rank) for rank in ranks), strict=True)]


def _answers(config: Config, plan: Plan, rank: int) -> list[Any]:
    """Return what a rank would send in each `gather_json` over the pipeline before the first step.

    Args:
        rank: the global rank.
    """
    mesh = mesh_of(config, plan, rank, torch.device("cpu"))
    mesh = replace(mesh, pp=_Asking(**vars(mesh.pp)))
    place = plan.schedule.placement
    own = [plan.spans[stage] for stage in place.stages_on(mesh.pp.rank)]
    provider = stage_provider(_provider(config), own)
    # On the meta device modules have shapes and no storage.
    with room(mesh, plan), torch.device("meta"):
        modules = [_typed(config, provider(config.model, span, mesh.tp)) for span in own]
    # The functions of a run that ask the pipeline, each up to its question.
    return [
        _answer(lambda: check_ownership(modules, config.model, provider, place, mesh)),
        _answer(lambda: take_census(modules, mesh)),
        _answer(lambda: dtype_of(modules, mesh.pp)),
    ]


def _answer(question: Callable[[], object]) -> Any:
    """Run a function up to its first call of `gather_json`, and return the value that it sends.

    Args:
        question: the function. The mesh that it uses must have an `_Asking` as the pipeline axis.
    Raises: AssertionError if the function does not gather.
    """
    try:
        question()
    except _Asked as asked:
        return asked.args[0]
    raise AssertionError("the function does not ask the pipeline")


def _typed(config: Config, module: nn.Module) -> nn.Module:
    """Return the module with its weights in the run's dtype, frozen if the flags say so."""
    if config.optimizer.freeze_all_layers:
        module = module.requires_grad_(False)
    if config.precision.bf16:
        return module.to(torch.bfloat16)
    if config.precision.fp16:
        return module.to(torch.float16)
    return module


def _provider(config: Config) -> Any:
    """Return the function that builds the model: --model-provider's, or the GPT's."""
    name = config.model.model_provider
    if name:
        return find_provider(name)
    return gpt_provider


@dataclass(frozen=True)
class _Noise:
    """A data set of 2**40 samples, each of random tokens.

    Attributes:
        length: tokens of a sample, without the last label.
        vocab: tokens are smaller than this.
    """

    length: int
    vocab: int

    # More samples than any run reads.
    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, sample: int) -> Any:
        return torch.randint(self.vocab, (self.length + 1,)).numpy()


def rehearse_rank(config: Config, plan: Plan, rank: int, answers: Answers, steps: int) -> Rehearsed:
    """Run a rank alone for `steps` timed steps, and return its measurements.

    Args:
        rank: the global rank.
        answers: results of gathers before the first step, from `answers_of`.
    """
    training = rank_alone(config, plan, rank, answers)
    # The first step allocates and compiles.
    timed_step(training)
    return rehearsed(training, [timed_step(training) for _ in range(steps)])


def rehearsed(
    training: Training, timed: Sequence[tuple[list[MeasuredPass], list[MeasuredPass], float]]
) -> Rehearsed:
    """Run further steps to measure the memory, and return all measurements of a rank.

    Args:
        training: the rank's training, on a mesh of one real rank.
        timed: the results of `timed_step`; empty to measure only the memory.
    """
    outside = 0.0
    if timed:
        outside = median(took - (row[-1].end - row[0].begin) for row, _, took in timed)
    # Counting the bytes makes steps slower, so these steps come after the timed ones.
    own = training.run.plan.schedule.placement.stages_on(training.run.mesh.pp.rank)
    steps = [passes for passes, _, _ in timed]
    copies = [copied for _, copied, _ in timed]
    return Rehearsed(own, steps, outside, parts_of(training), copies)


def rank_alone(config: Config, plan: Plan, rank: int, answers: Answers) -> Training:
    """Return a training of one rank without the other ranks, before its first step.

    Args:
        rank: the global rank.
        answers: results of gathers before the first step, from `answers_of`.
    """
    mesh = mesh_of(config, plan, rank, pick_device(config.parallel), answers).activate()
    # The lines of a run's start would be printed once for each rank.
    with (
        open(os.devnull, "w", encoding="utf-8") as quiet,
        contextlib.redirect_stdout(quiet),
        room(mesh, plan),
    ):
        training = run_on(mesh, config, plan)
    training.run.stages.engine.transport.post = delivered  # type: ignore[method-assign]
    return training


def run_on(mesh: ProcessMesh, config: Config, plan: Plan) -> Training:
    """Return a training on random tokens, without checkpoints and log."""
    vocab = (config.model.padded_vocab_size or 2) - 1
    # Nothing is loaded, saved, logged or evaluated, and no worker reads ahead.
    config = replace(config, checkpoint=CheckpointConfig(), log=LogConfig())
    config = config.with_fields(num_workers=0, eval_interval=None)
    # With a large loss scale, noise would overflow and the update be skipped.
    if config.precision.fp16:
        config = config.with_fields(loss_scale=1.0)
    data = Datasets(_Noise(config.batch.sequence, vocab), None, None)
    return Training(
        config, mesh, _provider(config), forward_step, data, vocab - 1, time.monotonic(), plan=plan
    )


def delivered(ops: list[Op]) -> Sequence[_There]:
    """Replace `Transport.post`: fill tensors to receive with random numbers, and send nothing.

    Args:
        ops: the sends and receives.
    Returns: for each of them a handle that is complete.
    """
    for op in ops:
        if not op.sends:
            op.tensor.copy_(_noise(op.tensor.shape, op.tensor.device))
    return [_There()] * len(ops)


class _There:
    """A handle of a message that has arrived, with the methods of torch.distributed's."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True: the message has arrived."""
        return True


# Each shape is drawn once, so that drawing takes no time of a pass.
@cache
def _noise(shape: torch.Size, device: torch.device) -> Tensor:
    """Return small random numbers of a shape, the same at each call."""
    return torch.randn(shape, device=device) * 0.01


def timed_step(training: Training) -> tuple[list[MeasuredPass], list[MeasuredPass], float]:
    """Run a step and measure the time of each pass.

    Two passes that the schedule runs together, such as F with B, run one after the other here.

    Args:
        training: the rank's training.
    Returns: (the passes with their times, the copies to and from the host, seconds of the step).
    """
    stages = training.run.stages
    schedule = stages.schedule
    costs = training.run.plan.costs
    paired = any(len(step) > 1 for step in schedule.steps())
    if paired:
        stages.follow(unpaired(schedule), costs)
    synchronize(training.run.mesh.device)
    began = time.perf_counter()
    training.driver.whole()
    synchronize(training.run.mesh.device)
    took = time.perf_counter() - began
    # The stopwatch knows the passes by the table, so it is read before the pairs return.
    ran = stages.stopwatch.ran(training.run.mesh.pp.rank)
    copies = stages.stopwatch.copied()
    if paired:
        stages.follow(schedule, costs)
    return ran, copies, took
