"""What one rank says while it trains: lines on the console and scalars on the board, both from the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from megapipe.config import Config
from megapipe.distributed.device import memory_bytes, synchronize
from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.optimizer import Optimizer
from megapipe.schedule import Placement
from megapipe.training.flops import flops_per_token
from megapipe.training.log import IterationReport, TensorBoard, iteration_line, perplexity, validation_lines
from megapipe.training.progress import Progress, Window
from megapipe.training.step import StepResult


class Reporter:
    """Speaks on one rank, the one with the loss (as Megatron's last rank does under 1F1B); silent on the others."""

    def __init__(self, config: Config, mesh: ProcessMesh, place: Placement) -> None:
        self.config, self.mesh = config, mesh
        speaker = place.rank_of[place.chain - 1]
        self.speaks = (mesh.pp.rank, mesh.dp_cp.rank, mesh.tp.rank) == (speaker, 0, 0)
        self._window = Window()
        self._board = TensorBoard(config.log if self.speaks else replace(config.log, tensorboard_dir=None))
        self._flops = flops_per_token(config.model, config.train.sequence)

    def say(self, text: str) -> None:
        """Print on the speaking rank."""
        if self.speaks:
            print(text, flush=True)

    def iteration(self, result: StepResult, progress: Progress, lr: float, optimizer: Optimizer) -> None:
        """The line every --log-interval iterations and after the first, TensorBoard at its own interval.

        A collective on some iterations (--log-params-norm): to be called on every rank. lr: as Megatron prints it,
        already that of the next iteration.
        """
        config, log, n, window = self.config, self.config.log, progress.iteration, self._window
        window.add(result)
        on_board = log.tensorboard_dir is not None and n % log.tensorboard_log_interval == 0
        regular = n % log.log_interval == 0
        in_line = regular or window.first
        if not (on_board or in_line):
            return
        norm = optimizer.params_norm() if log.log_params_norm else None
        if on_board:
            scalars = {
                "learning-rate": lr,
                "batch-size": result.batch,
                **result.losses,
                "loss-scale": progress.loss_scale.scale,
                "grad-norm": result.grad_norm,
                "num-zeros": result.num_zeros,
                "params-norm": norm,
                "world-size": config.world_size if log.log_world_size_to_tensorboard else None,
            }
            if log.log_memory_to_tensorboard:
                scalars.update(memory_bytes(self.mesh.device))
            self._scalars(scalars, progress)
        if not in_line:
            return
        synchronize(self.mesh.device)
        seconds = window.seconds_per_iteration()
        tokens_per_second = window.samples * config.train.sequence / window.seconds
        tflops = self._flops * tokens_per_second / config.world_size / 1e12 if log.log_throughput else None
        report = IterationReport(
            iteration=n,
            train_iters=progress.last_iteration(config),
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
            tflops=tflops,
            tokens_per_second=tokens_per_second,
        )
        self.say(iteration_line(report, datetime.now()))
        self._scalars({"iteration-time": seconds, "throughput": tflops}, progress)
        window.told(regular=regular)

    def validation(self, losses: Mapping[str, float], where: str, progress: Progress) -> None:
        """The lines of one evaluation and its scalars. As in Megatron-LM the test set's have the validation's tags."""
        self.say(validation_lines(where, losses))
        scalars: dict[str, float | None] = {f"{name} validation": loss for name, loss in losses.items()}
        if self.config.log.log_validation_ppl_to_tensorboard:
            scalars |= {f"{name} validation ppl": perplexity(loss) for name, loss in losses.items()}
        self._scalars(scalars, progress)

    def pause(self) -> None:
        """What came since the last iteration is no part of the next one's time."""
        self._window.restart()

    def close(self) -> None:
        """Flush."""
        self._board.close()

    def _scalars(self, values: Mapping[str, float | None], progress: Progress) -> None:
        self._board.scalars(values, progress.iteration, progress.consumed_train_samples)
