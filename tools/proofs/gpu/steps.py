"""Whole steps, and an evaluation, of every rank of a run: what each asks of NCCL, and where its host waits."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megapipe.commands.plan.rehearse import planned, world_ranks
from megapipe.commands.plan.rehearsed_rank import Answers, answers_of, run_on
from megapipe.config import Config
from megapipe.distributed.axis import Axis
from megapipe.distributed.grid import Grids
from megapipe.distributed.groups import num_links
from megapipe.distributed.mesh import ProcessMesh, axis_names, build_mesh
from megapipe.flags.parse import parse
from megapipe.pipeline_parallel import together
from megapipe.plan import Plan, with_batch
from megapipe.training.check import as_here
from megapipe.training.pretrain import Training
from megapipe.training.steps.stages import evaluate
from tools.proofs.gpu import fake_cuda
from tools.proofs.gpu.record import Group, Recorded, Recorder, recording
from tools.proofs.gpu.rules import Host, Item

GPU = torch.device("cuda", 0)
TINY = (
    "--bf16 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 1 --train-iters 100 --lr 1e-3 --eval-iters 1 "
    "--attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
)


def ready(flags: str, world: int) -> tuple[Config, Plan]:
    """The configuration of a run of so many ranks, and its plan."""
    return planned(replace(as_here(parse(Config, (TINY + flags).split())), world_size=world))


def records_of(flags: str, world: int) -> dict[int, list[Item]]:
    """What every rank asks for from its start to the end of two steps and an evaluation."""
    config, plan = ready(flags, world)
    answers = answers_of(config, plan, world_ranks(config))
    records: dict[int, list[Item]] = {}
    for rank in range(world):
        by = Recorder(rank)
        with started(config, plan, by, answers) as training:
            for _ in range(2):
                training.driver.step(lambda: False)
            if training.driver.open:
                training.driver._end()
            training.run.optimizer.gathers.settle()
            stages = training.run.stages.under(config.evaluation, with_batch(plan, config.evaluation).schedule)
            evaluate(stages, lambda consumed: _batch(config) * config.evaluation.num_microbatches, 0, 1)
        records[rank] = by.items
    return records


def host_waits(flags: str, world: int) -> Counter[str]:
    """How often the first rank's host waits for its device in the second step, by what it calls."""
    config, plan = ready(flags, world)
    with started(config, plan, by := Recorder(0), answers_of(config, plan, world_ranks(config))) as training:
        training.driver.step(lambda: False)
        before = len(by.items)
        training.driver.step(lambda: False)
    return Counter(item.why for item in by.items[before:] if isinstance(item, Host))


def _rows_of_an_expert(config: Config) -> int:
    """The choices of a rank's tokens, evenly."""
    parallel, model, train = config.parallel, config.model, config.train
    slices = parallel.context_parallel_size * (parallel.tensor_model_parallel_size if model.sequence_parallel else 1)
    tokens = train.sequence * (train.micro_batch_size or 1) // slices
    return tokens * model.moe_router_topk // (model.num_experts or 1)


def _batch(config: Config) -> list[torch.Tensor]:
    return [torch.empty(config.train.micro_batch_size or 1, config.train.sequence + 1, dtype=torch.int64)]


@contextlib.contextmanager
def started(config: Config, plan: Plan, by: Recorder, answers: Answers) -> Iterator[Training]:
    """A rank's run on the device that is not there, ready for its first step; inside, all that it asks is recorded."""
    mesh = mesh_of(config, plan, by, answers).activate()
    with (
        recording(),
        fake_cuda.running(by.host_waits, _rows_of_an_expert(config)),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        mock.patch.object(together, "same_stream", return_value=lambda: mode),  # a mode is of one thread alone
        open(os.devnull, "w", encoding="utf-8") as quiet,
        contextlib.redirect_stdout(quiet),
    ):
        training = run_on(mesh, config, plan)
        training.driver._batches_at = lambda consumed: _batch(config) * config.num_microbatches
        names = training.run.stages._add_up._names  # ranks with the loss tell the others
        names |= {evaluate: ["lm loss"] for evaluate in (False, True)}
        yield training


def mesh_of(config: Config, plan: Plan, by: Recorder, answers: Answers) -> ProcessMesh:
    """The mesh of a rank of which no other is there."""

    def make_group(name: str, sets: Any) -> Any:
        ranks = next((ranks for ranks in sets if by.rank in ranks), None)
        return None if ranks is None else Group(by, name, ranks)

    grids, links = Grids.of(config.parallel, config.world_size), num_links(config.parallel.pipeline_model_parallel_size)
    mesh = build_mesh(grids, by.rank, GPU, make_group, shares=plan.shares, one_way=links)
    made: dict[int, Axis] = {}

    def recorded(axis: Axis) -> Axis:
        return made.setdefault(id(axis), Recorded(**vars(axis), answers=answers if axis is mesh.pp else ()))

    axes: dict[str, Any] = {name: recorded(getattr(mesh, name)) for name in axis_names()}
    beside = {name: recorded(axis) for name, axis in mesh.tp.beside.items()}
    axes["tp"] = replace(axes["tp"], beside=beside)
    return replace(mesh, **axes)
