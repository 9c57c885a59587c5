"""What one rank says while it trains: lines on the console and scalars on the board, both from the same numbers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from megapipe.config import Config
from megapipe.distributed.device import memory_bytes, peak_tflops, synchronize
from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.plan import Plan
from megapipe.training.progress import Progress, Window
from megapipe.training.report.counters import THIRD, Counters, table
from megapipe.training.report.flops import flops_per_token
from megapipe.training.report.lines import (
    LEGEND,
    IterationReport,
    TensorBoard,
    iteration_line,
    passes_fields,
    perplexity,
    short_line,
    validation_lines,
)
from megapipe.training.report.metrics import PREFIX, MetricsFile, of_passes, tags_of
from megapipe.training.report.timers import Timers, text
from megapipe.training.report.weights_and_biases import WeightsAndBiases
from megapipe.training.steps.step import StepResult

Board = TensorBoard | WeightsAndBiases


class Reporter:
    """Speaks on one rank, the one with the loss (as Megatron's last rank does under 1F1B); silent on the others."""

    def __init__(self, config: Config, mesh: ProcessMesh, plan: Plan) -> None:
        self.config, self.mesh, place = config, mesh, plan.schedule.placement
        speaker = place.rank_of[place.chain - 1]
        self.speaks = (mesh.pp.rank, mesh.dp_cp.rank, mesh.tp.rank) == (speaker, 0, 0)
        self._window = Window()
        self._boards: tuple[Board, ...] = (TensorBoard(config.log), WeightsAndBiases(config)) if self.speaks else ()
        self._timers = Timers(config.log, mesh)
        self._metrics = MetricsFile(config.log.metrics_file if self.speaks else None)
        self._flops = flops_per_token(config.model, config.train.sequence)
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
            rows = [table(now, self._place), "; ".join(x.strip(" |") for x in passes_fields(now))]
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
        norm = optimizer.params_norm() if log.log_params_norm else None
        if log.metrics_file is not None and self.speaks:
            self._write_metrics(result, progress, lr, norm)
        if on_board:
            self._write_board(result, progress, lr, norm)
        if not in_line:
            return
        synchronize(self.mesh.device)
        seconds = window.seconds_per_iteration()
        tokens_per_second = window.samples * config.train.sequence / window.seconds
        device_tflops, mfu = self._speed(tokens_per_second)
        last = progress.last_iteration(config)
        report = IterationReport(
            iteration=n,
            train_iters=last,
            consumed_samples=progress.consumed_train_samples,
            elapsed_ms=seconds * 1e3,
            learning_rate=lr,
            global_batch_size=result.batch,
            losses=window.mean_losses(),
            loss_scale=progress.loss_scale.scale,
            grad_norm=result.grad_norm,
            num_zeros=result.num_zeros,
            params_norm=norm,
            skipped=window.skipped,
            nan=window.nan,
            late=(window.late, window.undone) if config.parallel.enable_optimizer_post_validation else None,
            tflops=device_tflops if log.log_throughput else None,
            tokens_per_second=tokens_per_second,
            device_tflops=device_tflops,
            mfu=mfu,
            now=self._counters.now,
            remaining=seconds * (last - n) if sys.stdout.isatty() else None,
        )
        self.say(short_line(report) if log.log_format == "short" else iteration_line(report, datetime.now()))
        if log.log_straggler and (text := self._counters.straggler()):
            self.say(text)
        self._scalars({"iteration-time": seconds, "throughput": report.tflops}, progress)
        ours = {"tokens-per-second": tokens_per_second, "tflops-per-device": device_tflops, "mfu": mfu}
        self._write({f"{PREFIX}{tag}": x for tag, x in (ours | tags_of(report.now, self._place)).items()}, n)
        self._tell_timers(n)
        if regular:
            self._timers.restart()
        window.told(regular=regular)

    def validation(self, losses: Mapping[str, float], where: str, samples: range, progress: Progress) -> None:
        """The lines of one evaluation and its scalars. As in Megatron-LM the test set's have the validation's tags."""
        self.say(validation_lines(where, losses, samples))
        scalars: dict[str, float | None] = {f"{name} validation": loss for name, loss in losses.items()}
        if self.config.log.log_validation_ppl_to_tensorboard:
            scalars |= {f"{name} validation ppl": perplexity(loss) for name, loss in losses.items()}
        self._scalars(scalars, progress)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Samples are waited for."""
        began = time.perf_counter()
        yield
        self._timers.wait(time.perf_counter() - began)

    def pause(self) -> None:
        """What came since the last iteration is no part of the next one's time."""
        self._window.restart()

    def close(self) -> None:
        """Flush."""
        for board in self._boards:
            board.close()
        self._metrics.close()

    def _speed(self, tokens_per_second: float) -> tuple[float, float | None]:
        """TFLOP/s of a device, and that as a share of its peak."""
        tflops = self._flops * tokens_per_second / self.config.world_size / 1e12
        return tflops, None if self._peak is None else tflops / self._peak

    def _write_board(self, result: StepResult, progress: Progress, lr: float, norm: float | None) -> None:
        """Megatron's scalars of an iteration."""
        config, log = self.config, self.config.log
        scalars = {
            "learning-rate": lr,
            "batch-size": result.batch,
            **result.shown,
            "loss-scale": progress.loss_scale.scale,
            "grad-norm": result.grad_norm,
            "num-zeros": result.num_zeros,
            "params-norm": norm,
            "world-size": config.world_size if log.log_world_size_to_tensorboard else None,
        }
        if log.moe_per_layer_logging:
            layers = result.routed.per_layer.items()
            scalars |= {f"moe/{name}_layer_{n}": x for name, row in layers for n, x in enumerate(row)}
        if log.log_memory_to_tensorboard:
            scalars.update(memory_bytes(self.mesh.device))
        self._scalars(scalars, progress)

    def _write_metrics(self, result: StepResult, progress: Progress, lr: float, norm: float | None) -> None:
        now, seconds = self._counters.now, self._window.last_seconds
        tokens_per_second = result.batch * self.config.train.sequence / seconds
        tflops, mfu = self._speed(tokens_per_second)
        self._metrics.write(
            {
                "iteration": progress.iteration,
                "consumed_samples": progress.consumed_train_samples,
                "losses": result.shown,
                **({"tokens_per_expert": result.routed.tokens} if self.config.log.moe_per_layer_logging else {}),
                "grad_norm": result.grad_norm,
                "params_norm": norm,
                "num_zeros": result.num_zeros,
                "learning_rate": lr,
                "loss_scale": progress.loss_scale.scale,
                "batch": result.batch,
                "skipped": result.skipped,
                "step_ms": seconds * 1e3,
                "tokens_per_second": tokens_per_second,
                "tflops_per_device": tflops,
                "mfu": mfu,
                **(of_passes(now, self._place, self._counters.slow) if now else {}),
            }
        )

    def _scalars(self, values: Mapping[str, float | None], progress: Progress) -> None:
        self._write(values, progress.iteration, progress.consumed_train_samples)

    def _write(self, values: Mapping[str, float | None], iteration: int, samples: int | None = None) -> None:
        for board in self._boards:
            board.scalars(values, iteration, samples)

    def _tell_timers(self, iteration: int) -> None:
        log, times = self.config.log, self._timers.read()
        if times:
            self.say(text(times, log.timing_log_option))
        if log.log_timers_to_tensorboard:
            self._write({f"{name}-time": max(seconds) for name, seconds in times.items()}, iteration)
