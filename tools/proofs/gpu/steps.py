"""Whole steps, and an evaluation, of every rank of a run: what each asks of NCCL, and where its
host waits.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megapipe.commands.plan.rehearse import planned, world_ranks
from megapipe.commands.plan.rehearsed_rank import Answers, answers_of, run_on
from megapipe.config import Config
from megapipe.distributed.axis import Axis
from megapipe.distributed.grid import Grids
from megapipe.distributed.groups import links_of
from megapipe.distributed.mesh import ProcessMesh, axis_names, build_mesh
from megapipe.flags.parse import parse
from megapipe.plan import Plan, with_batch
from megapipe.training.check import as_here
from megapipe.training.driver import Handover
from megapipe.training.evaluation import evaluate
from megapipe.training.pretrain import Training
from megapipe.training.steps.step import weights_of
from tools.proofs.gpu import fake_cuda
from tools.proofs.gpu.record import Group, Recorded, Recorder, recording, seen_from
from tools.proofs.gpu.roofline import Roofline
from tools.proofs.gpu.rules import Host, Item

GPU = torch.device("cuda", 0)
TINY = (
    "--bf16 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 1 --train-iters 100 --lr "
    "1e-3 --eval-iters 1 "
    "--clip-grad 1e9 --attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
)


def ready(flags: str, world: int) -> tuple[Config, Plan]:
    """Return the configuration of a run of a number of ranks, and its plan."""
    return planned(replace(as_here(parse(Config, (TINY + flags).split())), world_size=world))


def records_of(flags: str, world: int, whole: int) -> dict[int, list[Item]]:
    """Return the requests of every rank from its start to the end of two steps and an evaluation.

    Args:
        whole: the largest world of which every rank runs. Of larger ones a rank of each place of
            the pipeline does, and those that differ from it in other axes ask for the same, at
            their own places.
    """
    config, plan = ready(flags, world)
    answers = answers_of(config, plan, world_ranks(config))
    ran = dict[int, tuple[Recorder, list[Group]]]()
    records: dict[int, list[Item]] = {}
    for rank in range(world):
        by, groups = Recorder(rank), list[Group]()
        place = mesh_of(config, plan, by, answers, groups).pp.rank
        if world <= whole or place not in ran:
            ran[place] = by, groups
            _run(config, plan, by, answers)
        records[rank] = by.items if by.items else [*seen_from(*ran[place], by, groups)]
    return records


def _run(config: Config, plan: Plan, by: Recorder, answers: Answers) -> None:
    with started(config, plan, by, answers) as training:
        handover = Handover()
        for _ in range(2):
            handover = training.driver.step(handover, lambda: False)
        if handover.open:
            training.driver.end(handover.open, handover.good)
        training.run.optimizer.gathers.settle()
        stages = training.run.stages.under(
            config.evaluation, with_batch(plan, config.evaluation).schedule
        )
        batches = _batch(config) * config.evaluation.num_microbatches
        evaluate(stages, lambda consumed: batches, 0, 1, weights_of(training.run.optimizer))


def host_waits(flags: str, world: int) -> Counter[str]:
    """Count the times that a host waits for its device in the second step, by operation: the most
    of a pipeline's ranks.
    """
    config, plan = ready(flags, world)
    answers, counted = answers_of(config, plan, world_ranks(config)), list[Counter[str]]()
    for rank in world_ranks(config):
        with started(config, plan, by := Recorder(rank), answers) as training:
            handover = training.driver.step(Handover(), lambda: False)
            before = len(by.items)
            training.driver.step(handover, lambda: False)
        counted.append(Counter(item.why for item in by.items[before:] if isinstance(item, Host)))
    return max(counted, key=Counter.total)


def started_kernels(flags: str) -> dict[str, float]:
    """Count the launches of one rank's host in the third step, kernels one by one and graphs, and
    in the second one. The program that counts leaves out other operations of torch.
    """
    config, plan = ready(flags, 1)
    with started(
        config, plan, Recorder(0), answers_of(config, plan, world_ranks(config))
    ) as training:
        training.driver.whole()
        result = training.driver.whole()
        fake_cuda.CUDAGraph.launched = 0
        with Roofline() as roof:
            training.driver.whole()
    numbers = {"loss": result.losses["lm loss"], "norm": result.grad_norm}
    return {"kernels": roof.kernels.total(), "graphs": fake_cuda.CUDAGraph.launched, **numbers}


def _batch(config: Config) -> list[torch.Tensor]:
    return [
        torch.zeros(
            config.batch.micro_batch_size or 1, config.batch.sequence + 1, dtype=torch.int64
        )
    ]


@contextlib.contextmanager
def started(config: Config, plan: Plan, by: Recorder, answers: Answers) -> Iterator[Training]:
    """A rank's run on the device that is not there, ready for its first step; inside, all that it
    asks is recorded.
    """
    mesh = mesh_of(config, plan, by, answers).activate()
    with (
        recording(),
        fake_cuda.running(by.host_waits),
        open(os.devnull, "w", encoding="utf-8") as quiet,
        contextlib.redirect_stdout(quiet),
    ):
        training = run_on(mesh, config, plan)
        training.driver._batches_at = lambda consumed: _batch(config) * config.num_microbatches
        names = training.run.stages._adder._names  # ranks with the loss tell the others
        depths = [f"mtp_{n + 1} loss" for n in range(config.model.mtp_num_layers or 0)]
        names |= {evaluate: ["lm loss", *depths] for evaluate in (False, True)}
        yield training


def mesh_of(
    config: Config, plan: Plan, by: Recorder, answers: Answers, groups: list[Group] | None = None
) -> ProcessMesh:
    """Return the mesh of a rank whose other ranks do not exist. groups: receives the groups that
    were made for it.
    """

    def make_group(name: str, sets: Any) -> Any:
        ranks = next((ranks for ranks in sets if by.rank in ranks), None)
        if ranks is None:
            return None
        group = Group(by, name, ranks)
        if groups is not None:
            groups.append(group)
        return group

    grids, links = Grids.of(config.parallel, config.world_size), links_of(config.parallel)
    mesh = build_mesh(grids, by.rank, GPU, make_group, shares=plan.shares, num_links=links)
    made: dict[int, Axis] = {}

    def recorded(axis: Axis) -> Axis:
        return made.setdefault(
            id(axis), Recorded(**vars(axis), answers=answers if axis is mesh.pp else ())
        )

    axes: dict[str, Any] = {name: recorded(getattr(mesh, name)) for name in axis_names()}
    expert_axes = {name: recorded(axis) for name, axis in mesh.tp.expert_axes.items()}
    axes["tp"] = replace(axes["tp"], expert_axes=expert_axes)
    return replace(mesh, **axes)
