"""A rank's reports while it trains: lines on the console and scalars on the board, from the same numbers."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

from megapipe.config import Config
from megapipe.distributed.device import peak_tflops, synchronize
from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.plan import Plan
from megapipe.training.progress import Progress
from megapipe.training.report import timers
from megapipe.training.report.counters import THIRD, Counters, table
from megapipe.training.report.flops import flops_per_token
from megapipe.training.report.lines import LEGEND, iteration_line, perplexity, short_line, validation_lines
from megapipe.training.report.moment import Moment, Window
from megapipe.training.report.numbers import PASSES, as_json, fields, scalars
from megapipe.training.report.sinks import MetricsFile, TensorBoard, WeightsAndBiases
from megapipe.training.steps.step import StepResult

Board = TensorBoard | WeightsAndBiases


class Reporter:
    """Speaks on one rank, the one with the loss (as Megatron's last rank does under 1F1B); silent on the others."""

    def __init__(self, config: Config, mesh: ProcessMesh, plan: Plan) -> None:
        self.config, self.mesh, place = config, mesh, plan.schedule.placement
        speaker = place.rank_of[place.main - 1]
        self.speaks = (mesh.pp.rank, mesh.dp_cp.rank, mesh.tp.rank) == (speaker, 0, 0)
        self._window = Window()
        self._boards: tuple[Board, ...] = (TensorBoard(config.log), WeightsAndBiases(config)) if self.speaks else ()
        self._timers = timers.Timers(config.log, mesh)
        self._metrics = MetricsFile(config.log.metrics_file if self.speaks else None)
        self._flops = flops_per_token(config.model, config.batch.sequence)
        self._peak = config.log.device_peak_tflops or peak_tflops(mesh.device)
        self._place, self._compared = place, False
        self._counters = Counters(config, mesh, plan, speaker, speaks=self.speaks)

    def say(self, text: str) -> None:
        """Print on the speaking rank."""
        if self.speaks:
            print(text, flush=True)

    def measure(self, watch: Stopwatch, *, over: bool = True) -> None:
        """Add a step's passes; some are collectives of every rank. Not to be called within passes, see Counters."""
        self._timers.add(watch)
        self.mesh.position.enter("the exchange of measured times")
        slow = self._counters.add(watch, over=over)
        self.mesh.position.leave()
        for one in slow:
            self.say(f"slow: {one.text}" if one.cost is not None else f"slow no more: {one.text}")
        if not self._compared and self._counters.steps >= THIRD and (now := self._counters.now) is not None:
            self._compared = True
            self.say(f"measured over {now.steps} step(s), beside the plan's prediction at the same speed:")
            rows = [table(now, self._place), "; ".join(fields(PASSES, now))]
            self.say("\n".join([*rows, LEGEND] if len(now.ranks) > 1 else rows))

    def iteration(self, result: StepResult, progress: Progress, lr: float, optimizer: Optimizer) -> None:
        """The line every --log-interval iterations and after the first, TensorBoard at its own interval.

        A collective on some iterations (--log-params-norm, --timing-log-level): to be called on every rank. lr: as
        Megatron prints it, already that of the next iteration.
        """
        config, log, n, window = self.config, self.config.log, progress.iteration, self._window
        window.add(result)
        on_board = (log.tensorboard_dir or log.wandb_project) and n % log.tensorboard_log_interval == 0
        regular = n % log.log_interval == 0
        in_line = regular or window.first
        if not (on_board or in_line or log.metrics_file):
            return
        step = Moment(
            config,
            progress,
            result,
            Window.of(result, window.last_seconds),
            lr,
            optimizer.params_norm() if log.log_params_norm else None,
            self._flops,
            self._peak,
            self._counters,
        )
        if log.metrics_file is not None and self.speaks:
            self._metrics.write(as_json(step))
        if on_board:
            self._draw(scalars(step, line=False), progress)
        if in_line:
            synchronize(self.mesh.device)
            self._line(replace(step, over=window))
            if regular:
                self._timers.restart()
            window.told(regular=regular)

    def _line(self, moment: Moment) -> None:
        log = self.config.log
        terminal = sys.stdout.isatty()
        if log.log_format == "short" or (log.log_format == "auto" and terminal):
            self.say(short_line(moment, max(80, shutil.get_terminal_size().columns) if terminal else 80))
        else:
            self.say(iteration_line(moment, datetime.now()))
        if log.log_straggler and (text := self._counters.straggler()):
            self.say(text)
        self._draw(scalars(moment, line=True), moment.progress)
        if times := self._timers.read():
            self.say(timers.text(times, log.timing_log_option))
        if log.log_timers_to_tensorboard:
            most = {f"{name}-time": max(seconds) for name, seconds in times.items()}
            for board in self._boards:
                board.scalars(most, moment.progress.iteration)

    def validation(self, losses: Mapping[str, float], where: str, samples: range, progress: Progress) -> None:
        """The lines of one evaluation and its scalars. As in Megatron-LM the test set's have the validation's tags."""
        self.say(validation_lines(where, losses, samples))
        values = {f"{name} validation": loss for name, loss in losses.items()}
        if self.config.log.log_validation_ppl_to_tensorboard:
            values |= {f"{name} validation ppl": perplexity(loss) for name, loss in losses.items()}
        self._draw(values, progress)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Samples are waited for."""
        began = time.perf_counter()
        yield
        self._timers.wait(time.perf_counter() - began)

    def pause(self) -> None:
        """Leave out of the next iteration's time what came since the last one."""
        self._window.restart()

    def close(self) -> None:
        """Flush."""
        for board in self._boards:
            board.close()
        self._metrics.close()

    def _draw(self, values: Mapping[str, float], progress: Progress) -> None:
        for board in self._boards:
            board.scalars(values, progress.iteration, progress.consumed_train_samples)
