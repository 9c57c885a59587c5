"""Run a pretraining from the checks before the launch to the exit code."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

from megapipe.checkpoint.lock import one_run
from megapipe.checkpoint.save_load import check_save
from megapipe.config import Config
from megapipe.data.build import Datasets, build_datasets, reads
from megapipe.data.sources import mapped_files, refuse_cut_off
from megapipe.distributed.device import (
    be_deterministic,
    device_name,
    keep_freed_memory,
    pick_device,
    require_fp8,
    versions,
)
from megapipe.distributed.meeting.met import Met
from megapipe.distributed.meeting.together import on_first
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.seats import one_pipeline, seated
from megapipe.models.provider import Provider, gpt_provider
from megapipe.pipeline_parallel.loss import ForwardStep
from megapipe.pipeline_parallel.watch.watch import Watch
from megapipe.plan import Plan, make_plan
from megapipe.plan.table import saved_bytes
from megapipe.training.build import build_run
from megapipe.training.check import DatasetsProvider, Launch, check, checked, start_block
from megapipe.training.driver import Driver, Handover
from megapipe.training.evaluation import Evaluation
from megapipe.training.fallback import resumed
from megapipe.training.forward_step import forward_step as gpt_step
from megapipe.training.guards.kernels import use_common
from megapipe.training.guards.model import room
from megapipe.training.guards.process import Stopping, triggered
from megapipe.training.guards.ranks import contents, facts
from megapipe.training.guards.recovery import follow, kept_by, newest_on_disk, returned
from megapipe.training.guards.replicas import check_replicas
from megapipe.training.hooks import NONE, Hooks
from megapipe.training.reading import Reading
from megapipe.training.report.lines import arguments
from megapipe.training.report.profile import Profiler
from megapipe.training.report.reporter import Reporter
from megapipe.training.report.stdout import stdout_may_break
from megapipe.training.reschedule import with_rescheduling
from megapipe.training.saving import Saving
from megapipe.training.steps.rerouted import parallel_of_ranks, rerouted


@stdout_may_break()
def pretrain(
    config: Config,
    provider: Provider = gpt_provider,
    forward_step: ForwardStep = gpt_step,
    datasets: DatasetsProvider = build_datasets,
    hooks: Hooks = NONE,
) -> None:
    """Pretrain a model. Call this on every rank that the launcher started.

    1. With --check, print what would run, and return.
    2. Check the flags, the data and the checkpoint before ranks meet.
    3. Meet the other ranks.
    4. Build this rank's part of the run, and load the newest undamaged checkpoint.
    5. Train to the end, with evaluations and saves between steps.
    6. Exit with code 75, if the run was asked to stop before its end.

    Args:
        config: from `flags.parse.parse`, or built in Python. The world size comes from the
            launcher's environment.
        provider: builds this rank's stages, with our signature or Megatron's. --model-provider
            names another one. Default: the GPT of the flags.
        forward_step: Megatron's (data_iterator, model) -> (output, loss_func). The iterator yields
            `data.loader.Batch`. The iterator is None on stages that read no batches. Default:
            GPT's.
        datasets: returns the datasets. Items are arrays of token ids, or arrays by name.
        hooks: the user's parameter groups, learning-rate curve, callbacks, and stages that read
            batches.
    Raises: UserError with a text for the user, before any process group exists if possible.
    SystemExit(75) if a signal, a time limit or a file asked the run to stop before its end
    (docs/troubleshooting.md). Under torchrun, and for --exit-interval, the code is 0.
    """
    if config.check.check:
        check(config, datasets)
        return
    started = time.monotonic()
    launch = checked(config, provider, datasets)
    with ExitStack() as after, _meeting(launch, forward_step, datasets) as (mesh, plan):
        # The parts of a run refer to each other. Collecting them ends the data's threads and files.
        after.callback(gc.collect)
        training = _build(launch, mesh, plan, forward_step, started, hooks)
        # `train` freezes these parts, and --manual-gc disables the collector. A start that is
        # refused does neither, and leaves the collector as it was.
        after.callback(gc.unfreeze)
        if gc.isenabled():
            after.callback(gc.enable)
        exit_code = training.train()
        # The mesh closes after the last reference to what uses it is gone.
        del training
    if exit_code:
        sys.exit(exit_code)


@contextmanager
def _meeting(launch: Launch, *programs: Callable[..., Any]) -> Iterator[tuple[ProcessMesh, Plan]]:
    """Meet the other ranks, which must have equal flags and programs; close the mesh at the end.

    Args:
        launch: the checked parts of the run.
        programs: the user's functions, whose files are compared.
    Yields: (this rank's mesh, the plan). If the order of passes is searched, the plan is rank 0's.
    """
    config = launch.config
    if config.precision.deterministic_mode:
        be_deterministic()
    device = pick_device(config.parallel)
    if device.type == "cpu":
        # The C library would give a step's memory back to the system, which clears it before the
        # next step may use it.
        keep_freed_memory()
    require_fp8(device, config.model.fp8_format)
    # Without equal facts on all ranks, groups would deadlock or train different models.
    same = {}
    if config.world_size > 1:
        same = facts(config, launch.plan, (launch.provider, *programs))
    parallel = parallel_of_ranks(config)
    met = Met.of(parallel, device, same)
    plan = launch.plan or met.from_first("plan", partial(make_plan, config))
    mesh = ProcessMesh.create(parallel, device, plan.shares, met=met)
    if config.lacks_a_rank:
        mesh = seated(mesh, config.parallel, plan.shares)
    try:
        # The lock on --save comes before the model: a second run there is refused before it
        # allocates memory.
        with Watch(one_pipeline(mesh)), one_run(config.checkpoint.save, mesh):
            yield mesh, plan
    finally:
        mesh.close()


def _build(
    launch: Launch,
    mesh: ProcessMesh,
    plan: Plan,
    forward_step: ForwardStep,
    started: float,
    hooks: Hooks,
) -> Training:
    """Build this rank's part of the run.

    Args:
        launch: the checked parts of the run.
        mesh: this rank's mesh.
        plan: the plan of the run.
        forward_step: Megatron's (data_iterator, model) -> (output, loss_func).
        started: time.monotonic() at the start of `pretrain`.
        hooks: changes that the user's program makes to the run.
    Raises: ConfigError for a device with too little memory.
    """
    with room(mesh, plan):
        return Training(
            launch.config,
            mesh,
            launch.provider,
            forward_step,
            launch.data,
            launch.eod,
            started,
            launch.layers,
            plan,
            hooks,
        )


class Training:
    """One rank's part of a run: its steps, evaluations and saves.

    The constructor builds the stages and the optimizer, and loads the state that is kept in memory
    or the newest undamaged checkpoint. `train` runs to the end. Both are collective over the world.

    Args:
        config: the run's configuration, checked.
        mesh: this rank's mesh.
        provider: builds this rank's stages.
        forward_step: Megatron's (data_iterator, model) -> (output, loss_func).
        data: the datasets.
        eod: end-of-document id of the tokenizer.
        started: time.monotonic() at the start of `pretrain`, for --exit-duration-in-mins.
        layers: a description of the layers, for the log.
        plan: the plan of the run; None to make it of `config`.
        hooks: changes that the user's program makes to the run.

    Attributes:
        run: this rank's modules, optimizer and progress, which all other parts share.
        driver: runs the steps.
        evaluation: runs the evaluations.
        saving: saves checkpoints.
        copies: the training states that are kept in memory; None without
            --non-persistent-ckpt-type, and without a launcher that restarts ranks.
        check_files: raises if a data file has become shorter.
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
        if plan is None:
            plan = make_plan(config)
        report = Reporter(config, mesh, plan)
        lines = [arguments(config), start_block(config), hooks.lr_warning(config)]
        lines.append(reads(config, data))
        device = device_name(mesh.device)
        lines.append(f"using {mesh.world.size} {device} rank(s), {layers}; {versions(mesh.device)}")
        lines += use_common(mesh)
        report.say("\n".join(filter(None, lines)))
        fresh, parameters = build_run(
            config, mesh, plan, report, provider, forward_step, eod, hooks
        )
        if config.lacks_a_rank:
            fresh = rerouted(fresh, forward_step, eod)
        # Sizes of now: a file that is cut off later would kill the process that reads it.
        self.check_files = partial(refuse_cut_off, mapped_files(config.data))
        flags = config.checkpoint
        found: dict[str, str] = {}
        if flags.save or flags.load:
            # The first rank's files are enough: `facts` has compared them between all ranks.
            found = on_first(mesh, lambda: contents(config, data.train))
        # Loaded in place, into the modules that exist: a model is never in memory twice.
        self.copies = kept_by(fresh)
        back = None if self.copies is None else returned(fresh, self.copies)
        self.run = run = back or resumed(fresh, found)
        if self.copies is not None:
            follow(run, self.copies)
        self.hooks = with_rescheduling(hooks, config, plan)
        stages = run.stages
        reading = Reading(config, stages.mesh, stages.schedule.placement, stages.also_read)
        self.evaluation = Evaluation(run, self.hooks, reading, data, self.check_files)
        self.profiler = Profiler(config.log, mesh.world.rank)
        last = run.progress.iteration if back is None else newest_on_disk(run)
        self.saving = Saving(run, self.hooks, found, last)
        batches_at = reading.training(data.train, run.progress)
        self.driver = Driver(run, self.hooks, self.saving, batches_at)
        if flags.save:
            # Last, when the checkpoint's size is known: a disk that is too full stops the run here.
            size = saved_bytes(plan, config, parameters)
            check_save(flags.save, run.progress.iteration, mesh, size)

    def train(self) -> int:
        """Train to the last iteration, or until the run is asked to stop.

        Returns: the exit code of the process.
        """
        run = self.run
        config = run.config
        stopping = Stopping(config.guards, run.mesh, self.started)
        run.report.pause()
        first = n = run.progress.iteration
        consumed = run.progress.consumed_train_samples
        last = n
        if not config.data.skip_train:
            last = run.progress.last_iteration(config)
        gc.collect()
        # Modules, model and tables stay: a collection during a step need not visit them.
        gc.freeze()
        if config.guards.manual_gc:
            gc.disable()
        handover = Handover()
        # Also if a step fails: a save in the background is waited for, and its end reported.
        with closing(self.saving):
            while n < last:
                if n + 1 in config.guards.iterations_to_skip:
                    self.driver.pass_over()
                    first += n == first
                    n += 1
                    continue
                self.profiler.before(n)
                self.hooks.call("before_step", run)
                handover = self.driver.step(handover, lambda: stopping.wanted)
                # Between steps, where no pass is under way: the exchange of times is collective.
                run.report.measure(run.stages.stopwatch, over=handover.result is not None)
                if handover.result is not None:
                    self.driver.ended(handover.result)
                n += 1
                self._collect_garbage(n, after_first=n == first + 1)
                if self.profiler.after(n):
                    run.report.pause()
                self._shorten_timeout(first)
                self.saving.look()
                # While a step is open, its weights are a guess: nothing may read them.
                if not handover.open and self._between_steps(n, stopping):
                    break
            # The run is complete or stops here, so the last save may take its time.
            self.profiler.close(n)
            if config.checkpoint.save and self.saving.begun != n:
                self.saving.save(last=True)
            self.saving.finish(last=True)
        if self.copies is not None:
            # A launcher that stops its ranks to start fewer or more of them needs the states.
            if n < last:
                self.copies.now()
            else:
                self.copies.close()
        # A run that was stopped evaluates when it is resumed and complete.
        if n >= last:
            self.evaluation.finish()
        samples = run.progress.consumed_train_samples - consumed
        run.report.summary(n, samples, self.saving.begun)
        run.report.close()
        stopping.signal.close()
        return stopping.exit_code if n < last else 0

    def _between_steps(self, n: int, stopping: Stopping) -> bool:
        """Check replicas, evaluate and save, if that is due after iteration n.

        stopping: decides whether the run ends early.
        Returns: whether the run is to stop now.
        """
        run = self.run
        config = run.config
        flags = config.checkpoint
        interval = config.guards.check_weight_hash_across_dp_replicas_interval
        if interval and n % interval == 0:
            check_replicas(run.modules, run.mesh, mirrored=run.mirrored, after=n)
        self.evaluation.look()
        asked = triggered(config, run.mesh, n)
        due = flags.save_interval and n % flags.save_interval == 0
        if flags.save and ("save" in asked or due):
            # First, so that no checkpoint on disk is newer than the state in memory.
            if self.copies is not None:
                self.copies.now()
            self.saving.save()
            self.check_files()
            run.report.pause()
        reason = stopping.reason(n, asked)
        if reason:
            run.say(reason)
        return bool(reason)

    def _collect_garbage(self, n: int, *, after_first: bool) -> None:
        """Run Python's garbage collector after the first step, and at --manual-gc-interval.

        Args:
            n: the iteration that has ended.
            after_first: whether it is the first of this process.
        """
        interval = self.run.config.guards.manual_gc_interval
        if after_first or (interval and n % interval == 0):
            gc.collect()
        if after_first:
            # The first step also makes objects that stay.
            gc.freeze()

    def _shorten_timeout(self, first: int) -> None:
        """Set --distributed-timeout-seconds-after-init on all groups after the first step.

        first: number of iterations before the first step of this process.
        """
        run = self.run
        seconds = run.config.parallel.distributed_timeout_seconds_after_init
        # The first step takes longest, as caches and communicators warm up: it has the longer
        # timeout.
        if seconds and run.progress.iteration == first + 1:
            run.mesh.set_timeout(seconds)
