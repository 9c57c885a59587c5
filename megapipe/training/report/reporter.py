"""Report a run while it trains, with equal numbers in lines on the console and on boards."""

from __future__ import annotations

import shutil
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from statistics import median

from megapipe.config import Config
from megapipe.distributed.device import peak_tflops, synchronize
from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.plan import Plan
from megapipe.plan.seconds.flops import flops_per_token
from megapipe.training.progress import Progress
from megapipe.training.report import timers
from megapipe.training.report.compared import Measured, table
from megapipe.training.report.counters import THIRD, WINDOW, Counters
from megapipe.training.report.lines import (
    LEGEND,
    iteration_line,
    perplexity,
    short_line,
    validation_lines,
)
from megapipe.training.report.moment import Moment, Window
from megapipe.training.report.numbers import PASSES, as_json, fields, scalars
from megapipe.training.report.sinks import MetricsFile, TensorBoard, WeightsAndBiases
from megapipe.training.steps.step import StepResult

Board = TensorBoard | WeightsAndBiases


class Reporter:
    """Writes the log, boards and the metrics file on one rank; silent on all others.

    The rank that writes has the loss; in Megatron-LM the last rank writes.

    Every rank calls `measure` and `iteration` after each step, `validation` after an evaluation,
    `pause` after work between steps, and `close` at the end. `reading` times waits for samples.

    `say` prints a line on the rank that writes.

    Args:
        config: the run's configuration.
        mesh: this rank's mesh.
        plan: the plan of the run.

    Attributes:
        speaks: whether this rank writes.
    """

    def __init__(self, config: Config, mesh: ProcessMesh, plan: Plan) -> None:
        self.config = config
        self.mesh = mesh
        place = plan.schedule.placement
        speaker = place.rank_of[place.main - 1]
        self.speaks = (mesh.pp.rank, mesh.dp_cp.rank, mesh.tp.rank) == (speaker, 0, 0)
        self._window = Window()
        self._boards: tuple[Board, ...] = ()
        if self.speaks:
            self._boards = (TensorBoard(config.log), WeightsAndBiases(config))
        self._timers = timers.Timers(config.log, mesh)
        metrics_file = config.log.metrics_file if self.speaks else None
        self._metrics = MetricsFile(metrics_file)
        self._flops = flops_per_token(config.model, config.batch.sequence)
        self._peak = config.log.device_peak_tflops or peak_tflops(mesh.device)
        self._place = place
        self._compared = False
        self._all = array("d")
        # Durations of the last steps, but never the first, for the second prediction.
        self._seconds: deque[float] = deque(maxlen=2 * WINDOW)
        self._counters = Counters(config, mesh, plan, speaker, speaks=self.speaks)

    def say(self, text: str) -> None:
        """Print on the rank that writes the log."""
        if self.speaks:
            print(text, flush=True)

    def measure(self, watch: Stopwatch, *, over: bool = True) -> None:
        """Count a step's passes; print slow stages, and once a comparison with the plan.

        Some calls are collective over the world, so no rank may call this within its passes.

        Args:
            watch: times of the passes.
            over: whether the device has finished the step. If not, its times are read later.
        """
        # A rank that hangs in the exchange is reported with this place.
        self._timers.add(watch)
        self.mesh.position.enter("the exchange of measured times")
        slow = self._counters.add(watch, over=over)
        self.mesh.position.leave()
        for one in slow:
            head = "slow no more" if one.cost is None else "slow"
            self.say(f"{head}: {one.text}")
        if self._counters.steps < THIRD:
            return
        if not self._compared and (now := self._counters.now):
            self._compared = True
            self._compare(now)
        if self._counters.measures_enough:
            self._predict_again()

    def _compare(self, now: Measured) -> None:
        """Print the measured passes of the last steps, `now`, next to the plan's prediction."""
        what = f"the last {now.steps} steps"
        if now.steps == 1:
            what = "one step"
        self.say(f"measured: {what}, next to the plan's prediction at the same speed:")
        rows = [table(now, self._place), "; ".join(fields(PASSES, now))]
        if len(now.ranks) > 1:
            rows.append(LEGEND)
        self.say("\n".join(rows))

    def _predict_again(self) -> None:
        """Predict the step again from the passes so far; print a sentence if it differs much."""
        before = self._counters.now
        again = self._counters.predict_again([*self._seconds, self._window.elapsed])
        if again is None or before is None or not self._counters.predicts_again:
            return
        by = "FLOPs"
        if self.config.parallel.pipeline_costs is not None:
            by = "--pipeline-costs"
        self.say(
            f"passes and messages take other times than by {by}: by measured times the bubble is "
            f"{again.bubble:.1%}, not {before.predicted_bubble:.1%}, and a step takes "
            f"{again.step * 1e3:.1f} ms. Later lines predict by these times."
        )

    def iteration(
        self, result: StepResult, progress: Progress, lr: float, optimizer: Optimizer
    ) -> None:
        """Report a step: a line at --log-interval, and values for boards at their interval.

        Every rank must call this: with --log-params-norm or --timing-log-level some calls are
        collective.

        Args:
            result: the step's outcome.
            progress: iterations and samples so far.
            lr: the learning rate of the next iteration, which Megatron-LM prints too.
            optimizer: computes the norm of the parameters.
        """
        log = self.config.log
        n = progress.iteration
        # Counted in every step, whether something is printed or not.
        window = self._window
        first = self._counters.steps == 1
        window.add(result)
        # The first step is slower than all others.
        if not first:
            self._seconds.append(window.last_seconds)
            self._all.append(window.last_seconds)
        # Known on all ranks, though one alone has boards: the norm below is collective.
        has_board = log.tensorboard_dir or log.wandb_project
        on_board = has_board and n % log.tensorboard_log_interval == 0
        regular = n % log.log_interval == 0
        in_line = regular or window.first
        if not (on_board or in_line or log.metrics_file):
            return
        params_norm = None
        if log.log_params_norm:
            # A sum over ranks, so every rank calls it, whether it writes or not.
            params_norm = optimizer.params_norm()
        step = Moment(
            self.config,
            progress,
            result,
            Window.of(result, window.last_seconds),
            lr,
            params_norm,
            self._flops,
            self._peak,
            self._counters,
        )
        if log.metrics_file is not None and self.speaks:
            self._metrics.write(as_json(step))
        if on_board:
            self._draw(scalars(step, line=False), progress)
        if in_line:
            # The time of the window counts until its last step is complete on the device.
            synchronize(self.mesh.device)
            self._line(replace(step, over=window))
            if regular:
                self._timers.restart()
            window.printed(regular=regular)

    def _line(self, moment: Moment) -> None:
        """Print the line of an iteration, and the further lines that flags ask for.

        Args:
            moment: the state of the run to report.
        """
        log = self.config.log
        terminal = sys.stdout.isatty()
        if log.log_format == "short" or (log.log_format == "auto" and terminal):
            width = 80
            if terminal:
                width = max(80, shutil.get_terminal_size().columns)
            self.say(short_line(moment, width))
        else:
            self.say(iteration_line(moment, datetime.now()))
        if log.log_straggler:
            text = self._counters.straggler()
            if text:
                self.say(text)
        self._draw(scalars(moment, line=True), moment.progress)
        times = self._timers.read()
        if times:
            self.say(timers.text(times, log.timing_log_option))
        if log.log_timers_to_tensorboard:
            most = {f"{name}-time": max(seconds) for name, seconds in times.items()}
            # Without samples: Megatron-LM has these tags by iteration alone.
            for board in self._boards:
                board.scalars(most, moment.progress.iteration)

    def validation(
        self, losses: Mapping[str, float], where: str, samples: range, progress: Progress
    ) -> None:
        """Report an evaluation.

        Args:
            losses: {name: mean loss}.
            where: names the evaluation, such as "iteration 100".
            samples: numbers of the samples that were evaluated.
            progress: iterations and samples so far.
        """
        self.say(validation_lines(where, losses, samples))
        # As in Megatron-LM, the test set has the tags of the validation set.
        values = {f"{name} validation": loss for name, loss in losses.items()}
        if self.config.log.log_validation_ppl_to_tensorboard:
            for name, loss in losses.items():
                values[f"{name} validation ppl"] = perplexity(loss)
        self._draw(values, progress)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context whose time counts as a wait for samples."""
        began = time.perf_counter()
        yield
        self._timers.wait(time.perf_counter() - began)

    def pause(self) -> None:
        """Do not count a pause since the last step, such as an evaluation, as step time."""
        # Evaluations and saves are no part of an iteration's time.
        self._window.restart()

    def summary(self, n: int, samples: int, saved: int) -> None:
        """Print a line on this process's whole run; nothing after fewer than two steps.

        Args:
            n: the iteration after which it ended.
            samples: number of samples that it trained on.
            saved: iteration of the newest checkpoint on disk.
        """
        if not self._all:
            return
        tokens = samples * self.config.batch.sequence
        parts = [
            f"ended after iteration {n}: {len(self._all) + 1:,} steps, {tokens:,} tokens",
            f"median {median(self._all):.4g} s a step",
        ]
        now = self._counters.now
        if now is not None and len(now.ranks) > 1:
            parts.append(
                f"bubble {now.bubble:.1%} of the time of the passes, "
                f"predicted by {now.by} {now.predicted_bubble:.1%}"
            )
        save = self.config.checkpoint.save
        parts.append(f"checkpoint of iteration {saved} in {save}" if save else "no checkpoint")
        self.say("; ".join(parts))

    def close(self) -> None:
        """Flush and close all outputs."""
        for board in self._boards:
            board.close()
        self._metrics.close()

    def _draw(self, values: Mapping[str, float], progress: Progress) -> None:
        for board in self._boards:
            board.scalars(values, progress.iteration, progress.consumed_train_samples)
