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

from torch import nn

from megapipe.checkpoint.lock import one_run
from megapipe.checkpoint.save_load import LoadedState, check_save, find_checkpoint, refuse_save
from megapipe.checkpoint.saved_config import with_checkpoint_args
from megapipe.checks.run import validate
from megapipe.config import Config
from megapipe.config.layers import inline
from megapipe.data.build import Datasets, build_datasets, reads
from megapipe.data.sources import mapped_files, refuse_cut_off
from megapipe.distributed.device import (
    be_deterministic,
    device_name,
    graph_pool,
    has_cuda,
    keep_freed_memory,
    memory_of,
    pick_device,
    require_fp8,
    versions,
)
from megapipe.distributed.meeting.together import on_first
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.build import stage_module
from megapipe.models.gpt import GPTModel
from megapipe.models.provider import Provider, StageProvider, find_provider, stage_provider
from megapipe.models.transformer_engine import choose_layers
from megapipe.optim.lr import LRSchedule
from megapipe.optim.optimizer import Optimizer
from megapipe.partition.spans import LayerSpan
from megapipe.pipeline_parallel.graphs.graphed import Graphs
from megapipe.pipeline_parallel.loss import ForwardStep
from megapipe.pipeline_parallel.watch.watch import Watch
from megapipe.plan import Plan, changes, in_words, make_plan, summary
from megapipe.plan.graphs import graphs_line, why_not
from megapipe.plan.logits import most_kept
from megapipe.plan.table import saved_bytes
from megapipe.schedule.recipe_line import to_line
from megapipe.training.check import DatasetsProvider, as_here, check, settled, start_block
from megapipe.training.driver import Course, Driver
from megapipe.training.evaluation import Evaluation
from megapipe.training.fallback import resumed
from megapipe.training.guards.kernels import use_alike
from megapipe.training.guards.model import check_ownership, room
from megapipe.training.guards.process import Stopping, triggered
from megapipe.training.guards.ranks import contents, facts
from megapipe.training.guards.replicas import check_replicas
from megapipe.training.progress import Progress
from megapipe.training.reading import Reading
from megapipe.training.report.lines import arguments, held_up_messages
from megapipe.training.report.profile import Profiler
from megapipe.training.report.reporter import Reporter
from megapipe.training.report.stdout import stdout_may_break
from megapipe.training.reschedule import with_rescheduling
from megapipe.training.run import Run
from megapipe.training.saving import Saving
from megapipe.training.seams import NONE, Seams
from megapipe.training.steps.stages import Stages


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
    tokenizer = validate(config, has_cuda=has_cuda(), own_data=datasets is not build_datasets)
    if config.model.model_provider is not None:
        provider = find_provider(config.model.model_provider)
    vocab = config.model.padded_vocab(tokenizer.vocab_size)
    impl, layers = choose_layers(config, has_cuda() and config.parallel.distributed_backend != "gloo")
    model = dataclasses.replace(inline(config.model), padded_vocab_size=vocab, transformer_impl=impl)
    config = settled(config, model)
    plan = make_plan(config)
    refuse_save(config.checkpoint, look(config.checkpoint))
    data = datasets(config, tokenizer)
    if config.train.deterministic_mode:
        be_deterministic()
    if (device := pick_device(config.parallel)).type == "cpu":
        keep_freed_memory()
    require_fp8(device, model.fp8_format)
    same = facts(config, plan, (provider, forward_step, datasets)) if config.world_size > 1 else {}
    mesh = ProcessMesh.create(config.parallel, device, plan.shares, same)
    run = None
    try:
        # The lock of --save comes before the model: a second run on the folder is refused before it takes memory.
        with Watch(mesh), one_run(config.checkpoint.save, mesh):
            with room(mesh, plan):
                run = Training(config, mesh, provider, forward_step, data, tokenizer.eod, started, layers, plan, seams)
            exit_code = run.train()
    finally:
        del run
        mesh.close()
        gc.enable()
        gc.unfreeze()
        gc.collect()  # the parts of a run know each other; with them end the threads and files of its data
    if exit_code:
        sys.exit(exit_code)


class Training:
    """One rank's run, and what goes through it: the steps, evaluation and saving.

    Attributes:
        run: what this rank has.
    """

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
        self.started = started
        plan = plan or make_plan(config)
        schedule, place = plan.schedule, plan.schedule.placement
        report = Reporter(config, mesh, plan)
        report.say(f"{arguments(config)}\n{start_block(config)}\n{seams.beside(config)}".rstrip())
        report.say(reads(config, data))
        report.say("\n".join((_using(mesh, layers), *use_alike(mesh))))
        own = [plan.spans[stage] for stage in place.stages_on(mesh.pp.rank)]
        provider = stage_provider(provider, own)
        modules = _built(config, provider, own, plan, mesh)
        if mesh.dp_cp.rank == 0:
            count = sum(p.numel() for module in modules for p in module.parameters())
            where = f"({mesh.tp.rank}, {mesh.pp.rank})"
            print(f" > number of parameters on (tensor, pipeline) model parallel rank {where}: {count}", flush=True)
        parameters = check_ownership(modules, config.model, provider, place, mesh)
        self._check_replicas = partial(check_replicas, modules, mesh, mirrored=place.num_chains > 1)
        self._check_replicas()
        if said := changes(plan):
            report.say(said)
        if mesh.world.rank == 0:
            print(summary(plan, config, parameters), flush=True)
        report.say(
            f"pipeline schedule {schedule.name}{in_words(schedule)}: {mesh.pp.size} ranks, "
            f"{schedule.num_microbatches} microbatches, "
            f"predicted bubble {plan.timeline.bubble / plan.timeline.makespan:.1%}"
        )
        if plan.recipe is not None:
            report.say(f"recipe: {to_line(plan.recipe)}")
        if mesh.device.type == "cuda" and (held_up := held_up_messages(config, schedule)):
            report.say(held_up)
        also = frozenset(stage for stage, span in enumerate(plan.spans) if seams.reads_on(span))
        stages = Stages(config, schedule, modules, forward_step, mesh, eod, also_read=also, costs=plan.costs)
        optimizer = Optimizer(modules, config.train, mesh, groups=seams.groups, **config.of_optimizer)
        _capture(stages, plan, report)
        curve = LRSchedule(0.0) if config.train.freeze_all_layers else LRSchedule.of(config)
        start = Progress.after(LoadedState(), config.train)
        run = Run(config, mesh, plan, report, modules, stages, optimizer, start, curve, seams.lr)
        flags, self.check_files = config.checkpoint, partial(refuse_cut_off, mapped_files(config.data))
        found = on_first(mesh, lambda: contents(config, data.train)) if flags.save or flags.load else {}
        self.run = run = resumed(run, found)
        self.seams, reading = with_rescheduling(seams, config, plan), Reading(config, mesh, place, also)
        self.evaluation = Evaluation(run, self.seams, reading, data, self.check_files)
        self.profiler, self.saving = Profiler(config.log, mesh.world.rank), Saving(run, self.seams, found)
        self.driver = Driver(run, self.seams, self.saving, reading.training(data.train, run.progress))
        if flags.save:
            size = saved_bytes(plan, config, parameters)
            check_save(flags.save, run.progress.iteration, mesh, size)

    def train(self) -> int:
        """Steps from where the run is to its last, or until it is to stop. Returns: the process's exit code."""
        run, config, progress, driver = self.run, self.run.config, self.run.progress, self.driver
        stopping = Stopping(config.train, run.mesh, self.started)
        began, hashes = progress.iteration, config.train.check_weight_hash_across_dp_replicas_interval
        seconds = config.parallel.distributed_timeout_seconds_after_init
        run.report.pause()
        last = progress.iteration if config.data.skip_train else progress.last_iteration(config)
        gc.collect()
        gc.freeze()  # modules, model and tables stay: no collection within a step need walk them
        if config.train.manual_gc:
            gc.disable()
        course, n = Course(), began
        with closing(self.saving):
            while n < last:
                self.profiler.before(n)
                self.seams.tell("before_step", run)
                course = driver.step(course, lambda: stopping.wanted)
                run.report.measure(run.stages.stopwatch, over=course.result is not None)
                if course.result is not None:
                    driver.ended(course.result)
                n += 1
                self._collect(n, began)
                if self.profiler.after(n):
                    run.report.pause()
                if seconds and progress.iteration == began + 1:
                    run.mesh.set_timeout(seconds)
                self.saving.look()
                if course.open:
                    continue
                if hashes and progress.iteration % hashes == 0:
                    self._check_replicas(after=progress.iteration)
                self.evaluation.look()
                asked, every = triggered(config, run.mesh, progress.iteration), config.checkpoint.save_interval
                if config.checkpoint.save and ("save" in asked or (every and progress.iteration % every == 0)):
                    self.saving.save()
                    self.check_files()
                    run.report.pause()
                if reason := stopping.reason(progress.iteration, asked):
                    run.say(reason)
                    break
            self.profiler.close(n)
            if config.checkpoint.save and self.saving.begun != progress.iteration:
                self.saving.save(last=True)
            self.saving.finish(last=True)
        if progress.iteration >= last:
            self.evaluation.finish()
        run.report.close()
        stopping.signal.close()
        return stopping.exit_code if progress.iteration < last else 0

    def _collect(self, iteration: int, began: int) -> None:
        """Garbage, where it is not left to Python: after the first step and every --manual-gc-interval."""
        every = self.run.config.train.manual_gc_interval
        if iteration == began + 1 or (every and iteration % every == 0):
            gc.collect()
        if iteration == began + 1:
            gc.freeze()  # nor what the step has made to stay


def _using(mesh: ProcessMesh, layers: str) -> str:
    return f"using {mesh.world.size} {device_name(mesh.device)} rank(s), {layers}; {versions(mesh.device)}"


def _built(
    config: Config, provider: StageProvider, own: Sequence[LayerSpan], plan: Plan, mesh: ProcessMesh
) -> list[nn.Module]:
    modules = [stage_module(config, provider, span, mesh.tp) for span in own]
    kept = most_kept(config, plan, memory_of(mesh.device))
    for module in modules:
        if isinstance(module, GPTModel):
            module.most_kept = kept
    return modules


def _capture(stages: Stages, plan: Plan, report: Reporter) -> None:
    """CUDA graphs, where --cuda-graph-impl asks for them and the run can have them; the line says which."""
    config, mesh, device = stages.config, stages.mesh, stages.mesh.device
    if said := graphs_line(config, plan.schedule, device.type):
        report.say(said)
        if device.type == "cuda" and not why_not(config, plan.schedule):
            tell = (
                partial(print, flush=True) if mesh.dp_cp.rank == 0 else lambda text: None
            )  # each rank has other stages
            stages.capture(Graphs(partial(graph_pool, device), config.parallel.cuda_graph_warmup_steps, tell))
