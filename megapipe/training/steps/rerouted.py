"""Run the steps of a run that lacks a rank: its peers run its passes, too.

The steps run as one pipeline of all ranks, in which each microbatch has stages of its own, see
`schedule/core/reroute.py`. With two replicas, losses and weights are a whole run's to the bit: the
gradients of the lost rank's microbatches are summed separately, and added where data parallelism
would add them. With more replicas these sums have another order. --grad-reduce-in-bf16 rounds both
sums in a whole run, where they are sent, but not here: its numbers differ with two replicas, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.config import Config, ParallelConfig
from megapipe.data.loader import Microbatch
from megapipe.distributed.late import Late
from megapipe.distributed.seats import one_pipeline
from megapipe.optim.buffers import FlatBuffers
from megapipe.pipeline_parallel.loss import ForwardStep
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.schedule import Costs, Schedule
from megapipe.schedule.core.joint import joint_costs
from megapipe.schedule.core.reroute import reroute
from megapipe.schedule.simulate import simulate
from megapipe.training.run import Run
from megapipe.training.steps.stages import Stages
from megapipe.training.steps.totals import Totals


def parallel_of_ranks(config: Config) -> ParallelConfig:
    """Return the parallel sizes by which process groups are made.

    If the run lacks a rank, all others form one pipeline.
    """
    if not config.lacks_a_rank:
        return config.parallel
    return replace(config.parallel, pipeline_model_parallel_size=config.world_size)


def rerouted(run: Run, forward_step: ForwardStep, eod: int) -> Run:
    """Return a run whose steps also run the passes of the missing rank.

    Prints how many times as long as in a whole run a step takes, by simulation.

    Args:
        run: the run as it was built, before any step.
        forward_step: Megatron's (data_iterator, model) -> (output, loss_func).
        eod: end-of-document id of the tokenizer.
    """
    table = run.plan.schedule
    stages = Rerouted(run, forward_step, eod)
    healthy = simulate(table, run.plan.costs).makespan
    factor = simulate(stages.schedule, stages.costs).makespan / healthy
    replicas = run.config.data_parallel_size
    run.say(
        f"--elastic: rank {len(table.ranks) - 1} of replica {replicas - 1} is missing. Its peers "
        f"run its passes, and a step takes {factor:.2f} times as long by the schedule's clock"
    )
    if run.config.parallel.reschedule_after is not None:
        run.say(
            "--reschedule-after: not before all ranks are back, as rerouted steps are not timed"
        )
    return replace(run, stages=stages)


class Rerouted(Stages):
    """The stages of a rank in a run that lacks one, with stages that it runs for that rank.

    Args:
        run: the run, with its optimizer and its stages under a whole table.
        forward_step: Megatron's (data_iterator, model) -> (output, loss_func).
        eod: end-of-document id of the tokenizer.
    """

    def __init__(self, run: Run, forward_step: ForwardStep, eod: int) -> None:
        self._of = run
        self._grads: list[tuple[FlatBuffers, Tensor]] = []
        self._adopted: list[nn.Module] = []
        if run.mesh.pp.rank == run.mesh.pp.size - 1:
            self._adopted = [self._adopt(n, module) for n, module in enumerate(run.modules)]
        mesh = one_pipeline(run.mesh)
        table = run.plan.schedule
        super().__init__(run.config, table, run.modules, forward_step, mesh, eod)

    def _adopt(self, chunk: int, module: nn.Module) -> nn.Module:
        """Return a stage with the same weights in the same memory, and gradients of its own.

        Args:
            chunk: the index of the stage among this rank's stages.
            module: the stage.
        """
        params = dict(module.named_parameters())
        same = {}
        for name, param in params.items():
            same[name] = nn.Parameter(param.detach(), param.requires_grad)
            vars(same[name]).update(vars(param))
        for buffers in self._of.optimizer.chunks[chunk]:
            grads = torch.zeros_like(buffers.grads)
            self._grads.append((buffers, grads))
            for name in buffers.names:
                buffers.give_grad(same[name], grads, name)
        # A copy of everything but the weights, which it finds as copied already.
        return deepcopy(module, {id(params[name]): param for name, param in same.items()})

    def follow(self, schedule: Schedule, costs: Costs) -> None:
        """Use another table from the next step on, without the missing rank.

        Args:
            schedule: the table of one whole replica.
            costs: not used: the plan's are the costs of a whole replica.
        """
        costs = self._of.plan.costs
        place = schedule.placement
        replicas = self._of.config.data_parallel_size
        lost = (replicas - 1, place.num_ranks - 1)
        # No rank holds more activations than the fullest one of a whole replica.
        memory = max(simulate(schedule, costs).peak)
        self.schedule = reroute(schedule, replicas, lost, costs, memory)
        self.costs = joint_costs(costs, schedule)
        # One module for each stage of the joint table: stages of the rank's replica, and in the
        # lost rank's seat some stages of the last replica.
        replica, seat = divmod(self.mesh.pp.rank, place.num_ranks)
        chunks = [place.position(stage) for stage in place.stages_on(seat)]
        self.modules = []
        reading = self._of.stages.also_read
        all_stages = range(self.schedule.placement.num_stages)
        self.also_read = [stage for stage in all_stages if stage % place.chain in reading]
        for stage in self.schedule.placement.stages_on(self.mesh.pp.rank):
            microbatch, position = divmod(stage, place.chain)
            is_own = microbatch % replicas == replica
            found = self._of.modules if is_own else self._adopted
            self.modules.append(found[chunks.index(position)])

    def run(
        self, microbatches: Sequence[Microbatch], consumed: int, **options: Any
    ) -> Late[Totals]:
        """Run all passes of one step, as `Stages.run`; its `weights` is not used.

        State is copied to memory before the passes, and not among them.
        """
        evaluate = options.get("evaluate", False)
        if self.copy is not None and not evaluate:
            for chunk in range(len(self._of.modules)):
                self.copy(chunk)()
        # Losses are divided by the microbatches of all replicas. With a whole run's scale, fp16
        # gradients have its size, and neither underflow nor overflow sooner.
        factor = 1
        if not self.config.batch.calculate_per_token_loss:
            factor = self._of.config.data_parallel_size
        scale = options.get("loss_scale", lambda: 1.0)
        options |= {"weights": None, "loss_scale": lambda: scale() * factor}
        totals = super().run(microbatches, consumed, **options)
        if not evaluate:
            # The plan predicts a whole table, with which these times cannot be compared.
            self.stopwatch = Stopwatch(self.mesh.device)
            for buffers, grads in self._grads:
                buffers.grads.add_(grads)
                grads.zero_()
            if factor > 1:
                for of_stage in self._of.optimizer.chunks:
                    for buffers in of_stage:
                        buffers.grads.div_(factor)
        return totals
