"""The whole of a run: check everything, build this rank's part, train, evaluate, save, tell."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import cache, partial

from megapipe.checkpoint.lock import one_run
from megapipe.checkpoint.save_load import check_save, find_checkpoint, refuse_save
from megapipe.checkpoint.saved_config import with_checkpoint_args
from megapipe.checks.run import validate
from megapipe.config import Config
from megapipe.config.layers import inline
from megapipe.data.build import Datasets, build_datasets, reads
from megapipe.data.loader import Microbatch
from megapipe.data.sources import mapped_files, refuse_cut_off
from megapipe.distributed.device import (
    be_deterministic,
    device_name,
    has_cuda,
    keep_freed_memory,
    pick_device,
    versions,
)
from megapipe.distributed.meeting.together import on_first
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.build import stage_module
from megapipe.models.provider import Provider, find_provider, stage_provider
from megapipe.models.transformer_engine import choose_layers
from megapipe.optim.lr import LRSchedule, decoupled_rate, learning_rate, weight_decay
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.stage import ForwardStep
from megapipe.pipeline_parallel.watch.watch import Watch
from megapipe.plan import Plan, changes, make_plan, summary, with_batch
from megapipe.training.check import DatasetsProvider, as_here, check, start_block
from megapipe.training.evaluation import Evaluation
from megapipe.training.fallback import resumed
from megapipe.training.guards.model import check_ownership
from megapipe.training.guards.numbers import Guard
from megapipe.training.guards.process import Stopping, triggered
from megapipe.training.guards.ranks import contents, facts
from megapipe.training.guards.replicas import check_replicas
from megapipe.training.guards.room import room
from megapipe.training.reading import Reading
from megapipe.training.report.lines import arguments
from megapipe.training.report.profile import Profiler
from megapipe.training.report.reporter import Reporter
from megapipe.training.report.stdout import stdout_may_break
from megapipe.training.reschedule import with_rescheduling
from megapipe.training.saving import Saving
from megapipe.training.seams import NONE, Seams
from megapipe.training.steps.late import PostValidation
from megapipe.training.steps.step import Pipeline, Rates, StepResult, train_step


@stdout_may_break()
def pretrain(
    config: Config,
    provider: Provider,
    forward_step: ForwardStep,
    datasets: DatasetsProvider = build_datasets,
    seams: Seams = NONE,
) -> None:
    """Pretrain a model as the configuration says. Call it on every rank that the launcher started.

    Args:
        config: from `cli.parse`, or built in Python; the world size is taken from the launcher's environment.
        provider: builds this rank's stages; ours or Megatron's signature. --model-provider names another.
        forward_step: (data_iterator, model) -> (output, loss_func), Megatron's; a microbatch of data_iterator is a
            `data.loader.Batch`, data_iterator is None on stages with neither embedding nor loss that do not ask.
        datasets: gives the datasets: items are token ids or, with more fields, arrays by name.
        seams: groups of parameters, a learning-rate curve, callbacks, stages that read; see docs/extending.md.
    Raises: UserError with a text for the user, before any process group exists where that is possible; SystemExit(75)
        if the run was asked to stop before its end (docs/troubleshooting.md).
    """
    if config.check.check:
        check(config, datasets)
        return
    started = time.monotonic()
    config = as_here(config)
    config = dataclasses.replace(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    look = cache(find_checkpoint)
    config = with_checkpoint_args(config, look)
    tokenizer = validate(config, has_cuda=has_cuda())
    if config.model.model_provider is not None:
        provider = find_provider(config.model.model_provider)
    vocab = config.model.padded_vocab(tokenizer.vocab_size)
    impl, layers = choose_layers(config, has_cuda() and config.parallel.distributed_backend != "gloo")
    model = dataclasses.replace(inline(config.model), padded_vocab_size=vocab, transformer_impl=impl)
    config = dataclasses.replace(config, model=model)
    plan = make_plan(config)
    refuse_save(config.checkpoint, look(config.checkpoint))
    data = datasets(config, tokenizer)
    if config.train.deterministic_mode:
        be_deterministic()
    if (device := pick_device(config.parallel)).type == "cpu":
        keep_freed_memory()
    same = facts(config, plan, (provider, forward_step, datasets)) if config.world_size > 1 else {}
    mesh = ProcessMesh.create(config.parallel, device, plan.shares, same)
    run = None
    try:
        with Watch(mesh), one_run(config.checkpoint.save, mesh):
            with room(mesh, plan):
                run = Run(config, mesh, provider, forward_step, data, tokenizer.eod, started, layers, plan, seams)
            exit_code = run.train()
    finally:
        del run
        mesh.close()
        gc.collect()  # the parts of a run know each other; with them end the threads and files of its data
    if exit_code:
        sys.exit(exit_code)


class Run:
    """One rank's part of a run."""

    def __init__(
        self,
        config: Config,
        mesh: ProcessMesh,
        provider: Provider,
        forward_step: ForwardStep,
        data: Datasets,
        eod: int,
        started: float,
        layers: str = "layers of plain torch (local)",
        plan: Plan | None = None,
        seams: Seams = NONE,
    ) -> None:
        self.config, self.mesh, self.started = config, mesh, started
        self.plan = plan = plan or make_plan(config)
        schedule, place = plan.schedule, plan.schedule.placement
        self.report = Reporter(config, mesh, plan)
        self.say = self.report.say
        self.say(f"{arguments(config)}\n{start_block(config)}\n{seams.beside(config)}".rstrip())
        self.say(reads(config, data))
        self.say(f"using {mesh.world.size} {device_name(mesh.device)} rank(s), {layers}; {versions(mesh.device)}")
        own = [plan.spans[stage] for stage in place.stages_on(mesh.pp.rank)]
        provider = stage_provider(provider, own)
        self.modules = [stage_module(config, provider, span, mesh.tp) for span in own]
        if mesh.dp_cp.rank == 0:
            count = sum(p.numel() for module in self.modules for p in module.parameters())
            where = f"({mesh.tp.rank}, {mesh.pp.rank})"
            print(f" > number of parameters on (tensor, pipeline) model parallel rank {where}: {count}", flush=True)
        parameters = check_ownership(self.modules, config.model, provider, place, mesh)
        self.check_replicas = partial(check_replicas, self.modules, mesh, mirrored=place.num_chains > 1)
        self.check_replicas()
        if plan.before is not None:
            self.say(changes(plan))
        if mesh.world.rank == 0:
            print(summary(plan, config, parameters), flush=True)
        self.say(
            f"pipeline schedule {schedule.name}: {mesh.pp.size} ranks, {schedule.num_microbatches} microbatches, "
            f"predicted bubble {plan.timeline.bubble / plan.timeline.makespan:.1%}"
        )
        also = frozenset(stage for stage, span in enumerate(plan.spans) if seams.reads_on(span))
        self.pipeline = Pipeline(
            config, schedule, self.modules, forward_step, mesh, eod, also_read=also, costs=plan.costs
        )
        self.seams, how = with_rescheduling(seams, config, plan), config.parallel.of_optimizer
        self.optimizer = Optimizer(self.modules, config.train, mesh, groups=seams.groups, **how)
        if any(len(chunk) > 1 for chunk in self.optimizer.chunks):
            self.pipeline.on_layer_done = self.optimizer.reduction.start_early
        self.lr = LRSchedule(0.0) if config.train.freeze_all_layers else LRSchedule.of(config)
        self.late = PostValidation(self) if config.parallel.enable_optimizer_post_validation else None
        self.reading = Reading(config, mesh, place, also)
        self.evaluation = Evaluation(self, self._pipeline(config.evaluation), data)
        self.profiler = Profiler(config.log, mesh.world.rank)
        flags = config.checkpoint
        self.contents = on_first(mesh, lambda: contents(config)) if flags.save or flags.load else {}
        self.progress = resumed(self)
        self.guard, self.saving = Guard(config.train, self.say), Saving(self)
        self.batches_at, self.files = self.reading.training(data.train, self.progress), mapped_files(config.data)
        if config.checkpoint.save:
            size = plan.saved_bytes(parameters, optimizer=not config.checkpoint.no_save_optim)
            check_save(config.checkpoint.save, self.progress.iteration, mesh, size)

    def train(self) -> int:
        """From where the run is to its last iteration, or until it is to stop. Returns: the process's exit code."""
        with closing(self.saving):
            return self._train()

    def _train(self) -> int:
        config, progress, seams = self.config, self.progress, self.seams
        self.stopping = stopping = Stopping(config.train, self.mesh, self.started)
        began = progress.iteration
        self.report.pause()
        last = progress.iteration if config.data.skip_train else progress.last_iteration(config)
        while progress.iteration + self._open < last:
            self.profiler.before(progress.iteration + self._open)
            seams.tell("before_step", self)
            self._step()
            self.profiler.after(progress.iteration + self._open)
            if (seconds := config.parallel.distributed_timeout_seconds_after_init) and progress.iteration == began + 1:
                self.mesh.set_timeout(seconds)
            self.saving.look()
            if self._open:
                continue
            if (often := config.train.check_weight_hash_across_dp_replicas_interval) and not progress.iteration % often:
                self.check_replicas(after=progress.iteration)
            self.evaluation.look()
            asked, every = triggered(config, self.mesh, progress.iteration), config.checkpoint.save_interval
            if config.checkpoint.save and ("save" in asked or (every and progress.iteration % every == 0)):
                self.saving.save()
                refuse_cut_off(self.files)
                self.report.pause()
            if reason := stopping.reason(progress.iteration, asked):
                self.say(reason)
                break
        self.profiler.close(progress.iteration + self._open)
        if config.checkpoint.save and self.saving.begun != progress.iteration:
            self.saving.save(last=True)
        self.saving.finish(last=True)
        if progress.iteration >= last:
            self.evaluation.finish()
        self.report.close()
        stopping.signal.close()
        return stopping.exit_code if progress.iteration < last else 0

    @property
    def _open(self) -> bool:
        """Has an iteration begun that has not ended?"""
        return self.late is not None and self.late.open

    def _step(self) -> None:
        """The next iteration's passes, and an iteration's end."""
        if self.late is None:
            result = self.step()
            self.report.measure(self.pipeline.stopwatch)
            self.ended(result)
        else:
            self.late.step()
            self.report.measure(self.pipeline.stopwatch, over=not self._open)

    def step(self) -> StepResult:
        """One iteration of training."""
        progress, rates = self.progress, self.rates()
        self.optimizer.weight_decay = rates.weight_decay
        batches = self.batches(progress.consumed_train_samples)
        run = partial(
            train_step,
            self.pipeline,
            self.optimizer,
            batches,
            progress.consumed_train_samples,
            rates.lr,
            ends_lr=rates.ends_lr,
            loss_scale=progress.loss_scale.scale,
            count_zeros=self.config.log.log_num_zeros_in_grad,
            iteration=progress.iteration + 1,
        )
        result = self.guard.step(
            lambda refuses: run(refuses=refuses), progress.iteration + 1, progress.loss_scale.scale, self.saving.last
        )
        progress.advance(result, self.config.train)
        return result

    def batches(self, consumed: int) -> Sequence[Microbatch]:
        """Of the step behind so many samples, whose batch `pipeline` then has."""
        if (size := self.config.batch_sizes.at(consumed)) != self.pipeline.config.global_batch_size:
            self.pipeline = self._pipeline(self.config.with_batch(size))
        with self.report.reading():
            return self.batches_at(consumed)

    def _pipeline(self, config: Config) -> Pipeline:
        """The stages under the batch of a configuration; a table of its own where it has other microbatches."""
        return self.pipeline.under(config, with_batch(self.plan, config).schedule)

    def ended(self, result: StepResult) -> None:
        """Tell of an iteration."""
        self.seams.tell("after_step", self, result)
        self.report.iteration(result, self.progress, self.rate(), self.optimizer)

    def rates(self) -> Rates:
        """Of the next step."""
        samples = self.progress.scheduled_samples
        return Rates(self.rate(), decoupled_rate(self.lr, samples, self.config.train), weight_decay(self.lr, samples))

    def rate(self) -> float:
        """The learning rate of the next step."""
        samples = self.progress.scheduled_samples
        return learning_rate(self.lr, samples) if self.seams.lr is None else self.seams.lr(samples)
