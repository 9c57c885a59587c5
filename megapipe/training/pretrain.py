"""The whole of a run: check everything, build this rank's part, train, evaluate, save, tell."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from torch import nn

from megapipe.checkpoint.lock import one_run
from megapipe.checkpoint.save_load import LoadedState, check_save
from megapipe.config import Config
from megapipe.data.build import Datasets, build_datasets, reads
from megapipe.data.sources import mapped_files, refuse_cut_off
from megapipe.distributed.device import (
    be_deterministic,
    device_name,
    graph_pool,
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
from megapipe.models.provider import Provider, stage_provider
from megapipe.optim.lr import LRSchedule
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.graphs.graphed import Graphs
from megapipe.pipeline_parallel.loss import ForwardStep
from megapipe.pipeline_parallel.watch.watch import Watch
from megapipe.plan import Plan, changes, in_words, make_plan, summary
from megapipe.plan.graphs import graphs_line, why_not
from megapipe.plan.logits import most_kept
from megapipe.plan.table import saved_bytes
from megapipe.schedule.recipe_line import to_line
from megapipe.training.check import DatasetsProvider, Launch, check, checked, start_block
from megapipe.training.driver import Course, Driver
from megapipe.training.evaluation import Evaluation
from megapipe.training.fallback import resumed
from megapipe.training.guards.kernels import use_alike
from megapipe.training.guards.model import check_ownership, room
from megapipe.training.guards.process import Stopping, triggered
from megapipe.training.guards.ranks import contents, facts
from megapipe.training.guards.replicas import check_replicas
from megapipe.training.hooks import NONE, Hooks
from megapipe.training.progress import Progress
from megapipe.training.reading import Reading
from megapipe.training.report.lines import arguments, held_up_messages
from megapipe.training.report.profile import Profiler
from megapipe.training.report.reporter import Reporter
from megapipe.training.report.stdout import stdout_may_break
from megapipe.training.reschedule import with_rescheduling
from megapipe.training.run import Run
from megapipe.training.saving import Saving
from megapipe.training.steps.stages import Stages


@stdout_may_break()
def pretrain(
    config: Config,
    provider: Provider,
    forward_step: ForwardStep,
    datasets: DatasetsProvider = build_datasets,
    hooks: Hooks = NONE,
) -> None:
    """Pretrain a model as the configuration says. Call it on every rank that the launcher started.

    Args:
        config: from `cli.parse`, or built in Python; the world size is taken from the launcher's environment.
        provider: builds this rank's stages; ours or Megatron's signature. --model-provider names another.
        forward_step: (data_iterator, model) -> (output, loss_func), Megatron's; a microbatch of data_iterator is a
            `data.loader.Batch`, data_iterator is None on stages with neither embedding nor loss that do not ask.
        datasets: gives the datasets: items are token ids or, with more fields, arrays by name.
        hooks: groups of parameters, a learning-rate curve, callbacks, stages that read; see docs/extending.md.
    Raises: UserError with a text for the user, before any process group exists where that is possible; SystemExit(75)
        if the run was asked to stop before its end (docs/troubleshooting.md).
    """
    if config.check.check:
        check(config, datasets)
        return
    started = time.monotonic()
    launch = checked(config, provider, datasets)
    with _meeting(launch, forward_step, datasets) as mesh:
        with room(mesh, launch.plan):
            given = forward_step, launch.data, launch.eod, started, launch.layers, launch.plan, hooks
            run = Training(launch.config, mesh, launch.provider, *given)
        exit_code = run.train()
        del run
    if exit_code:
        sys.exit(exit_code)


@contextmanager
def _meeting(launch: Launch, *programs: Callable[..., Any]) -> Iterator[ProcessMesh]:
    """Meet the other ranks, which must have the same programs, and part from them in the end."""
    config, plan = launch.config, launch.plan
    if config.precision.deterministic_mode:
        be_deterministic()
    if (device := pick_device(config.parallel)).type == "cpu":
        keep_freed_memory()
    require_fp8(device, config.model.fp8_format)
    same = facts(config, plan, (launch.provider, *programs)) if config.world_size > 1 else {}
    mesh = ProcessMesh.create(config.parallel, device, plan.shares, same)
    try:
        # The lock of --save comes before the model: a second run on the folder is refused before it takes memory.
        with Watch(mesh), one_run(config.checkpoint.save, mesh):
            yield mesh
    finally:
        mesh.close()
        gc.enable()
        gc.unfreeze()
        gc.collect()  # the parts of a run know each other; with them end the threads and files of its data


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
        hooks: Hooks = NONE,
    ) -> None:
        self.started = started
        plan = plan or make_plan(config)
        report = Reporter(config, mesh, plan)
        using = f"using {mesh.world.size} {device_name(mesh.device)} rank(s), {layers}; {versions(mesh.device)}"
        lines = arguments(config), start_block(config), hooks.lr_warning(config), reads(config, data), using
        report.say("\n".join(filter(None, [*lines, *use_alike(mesh)])))
        modules, parameters = _modules(config, mesh, plan, provider)
        self._check_replicas = partial(check_replicas, modules, mesh, mirrored=plan.schedule.placement.num_chains > 1)
        self._check_replicas()
        _say_plan(report, plan, parameters)
        also = frozenset(stage for stage, span in enumerate(plan.spans) if hooks.reads_on(span))
        stages = Stages(config, plan.schedule, modules, forward_step, mesh, eod, also_read=also, costs=plan.costs)
        optimizer = Optimizer(modules, config.optimizer, mesh, groups=hooks.groups, **config.of_optimizer)
        stages.engine.graphs = _graphs(report, plan)
        curve = LRSchedule(0.0) if config.optimizer.freeze_all_layers else LRSchedule.of(config)
        start = Progress.after(LoadedState(), config.precision)
        run = Run(config, mesh, plan, report, modules, stages, optimizer, start, curve, hooks.lr)
        flags, self.check_files = config.checkpoint, partial(refuse_cut_off, mapped_files(config.data))
        found = on_first(mesh, lambda: contents(config, data.train)) if flags.save or flags.load else {}
        self.run = run = resumed(run, found)
        self.hooks = with_rescheduling(hooks, config, plan)
        reading = Reading(config, mesh, plan.schedule.placement, also)
        self.evaluation = Evaluation(run, self.hooks, reading, data, self.check_files)
        self.profiler, self.saving = Profiler(config.log, mesh.world.rank), Saving(run, self.hooks, found)
        self.driver = Driver(run, self.hooks, self.saving, reading.training(data.train, run.progress))
        if flags.save:
            check_save(flags.save, run.progress.iteration, mesh, saved_bytes(plan, config, parameters))

    def train(self) -> int:
        """Steps from where the run is to its last, or until it is to stop. Returns: the process's exit code."""
        run, config, progress, driver = self.run, self.run.config, self.run.progress, self.driver
        stopping = Stopping(config.guards, run.mesh, self.started)
        began, hashes = progress.iteration, config.guards.check_weight_hash_across_dp_replicas_interval
        seconds = config.parallel.distributed_timeout_seconds_after_init
        run.report.pause()
        last = progress.iteration if config.data.skip_train else progress.last_iteration(config)
        gc.collect()
        gc.freeze()  # modules, model and tables stay: no collection within a step need walk them
        if config.guards.manual_gc:
            gc.disable()
        course, n, every_gc = Course(), began, config.guards.manual_gc_interval
        with closing(self.saving):
            while n < last:
                self.profiler.before(n)
                self.hooks.call("before_step", run)
                course = driver.step(course, lambda: stopping.wanted)
                run.report.measure(run.stages.stopwatch, over=course.result is not None)
                if course.result is not None:
                    driver.ended(course.result)
                n += 1
                # Garbage is collected here where it is not left to Python, and after the first step.
                if n == began + 1 or (every_gc and n % every_gc == 0):
                    gc.collect()
                if n == began + 1:
                    gc.freeze()  # nor what the step has made to stay
                if self.profiler.after(n):
                    run.report.pause()
                if seconds and progress.iteration == began + 1:
                    run.mesh.set_timeout(seconds)
                self.saving.look()
                if course.open:
                    continue
                if hashes and n % hashes == 0:
                    self._check_replicas(after=n)
                self.evaluation.look()
                asked, every = triggered(config, run.mesh, n), config.checkpoint.save_interval
                if config.checkpoint.save and ("save" in asked or (every and n % every == 0)):
                    self.saving.save()
                    self.check_files()
                    run.report.pause()
                if reason := stopping.reason(n, asked):
                    run.say(reason)
                    break
            self.profiler.close(n)
            if config.checkpoint.save and self.saving.begun != n:
                self.saving.save(last=True)
            self.saving.finish(last=True)
        if n >= last:
            self.evaluation.finish()
        run.report.close()
        stopping.signal.close()
        return stopping.exit_code if n < last else 0


def _modules(
    config: Config, mesh: ProcessMesh, plan: Plan, provider: Provider
) -> tuple[list[nn.Module], Sequence[int]]:
    """Build this rank's stages; return also the parameters of each pipeline rank."""
    place = plan.schedule.placement
    own = [plan.spans[stage] for stage in place.stages_on(mesh.pp.rank)]
    provider = stage_provider(provider, own)
    modules = [stage_module(config, provider, span, mesh.tp) for span in own]
    kept = most_kept(config, plan, memory_of(mesh.device))
    for module in modules:
        if isinstance(module, GPTModel):
            module.most_kept = kept
    if mesh.dp_cp.rank == 0:
        count = sum(p.numel() for module in modules for p in module.parameters())
        where = f"({mesh.tp.rank}, {mesh.pp.rank})"
        print(f" > number of parameters on (tensor, pipeline) model parallel rank {where}: {count}", flush=True)
    return modules, check_ownership(modules, config.model, provider, place, mesh)


def _say_plan(report: Reporter, plan: Plan, parameters: Sequence[int]) -> None:
    config, mesh, schedule, timeline = report.config, report.mesh, plan.schedule, plan.timeline
    if said := changes(plan):
        report.say(said)
    if mesh.world.rank == 0:
        print(summary(plan, config, parameters), flush=True)
    report.say(
        f"pipeline schedule {schedule.name}{in_words(schedule)}: {mesh.pp.size} ranks, "
        f"{schedule.num_microbatches} microbatches, predicted bubble {timeline.bubble / timeline.makespan:.1%}"
    )
    if plan.recipe is not None:
        report.say(f"recipe: {to_line(plan.recipe)}")
    if mesh.device.type == "cuda" and (held_up := held_up_messages(config, schedule)):
        report.say(held_up)


def _graphs(report: Reporter, plan: Plan) -> Graphs | None:
    """Return CUDA graphs where --cuda-graph-impl asks for them and the run can have them; the line says which."""
    config, mesh, device = report.config, report.mesh, report.mesh.device
    if not (said := graphs_line(config, plan.schedule, device.type)):
        return None
    report.say(said)
    if device.type != "cuda" or why_not(config, plan.schedule):
        return None
    # Each rank has other stages.
    tell = partial(print, flush=True) if mesh.dp_cp.rank == 0 else lambda text: None
    return Graphs(partial(graph_pool, device), config.parallel.cuda_graph_warmup_steps, tell)
