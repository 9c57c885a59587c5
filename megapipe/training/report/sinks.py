"""Sinks of a run's numbers beside the console: boards, and a file with a JSON line for every step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from megapipe.config import Config, LogConfig
from megapipe.training.report.numbers import PREFIX


class Sink:
    """A sink. What fails costs one warning, never the run, and from then on nothing is told there.

    Attributes:
        lost: what the warning says before the error.
        failures: errors that are the sink's.
    """

    failures: tuple[type[Exception], ...] = (OSError, UnicodeError)

    def __init__(self, lost: str) -> None:
        self.lost = lost
        self._to: Any = None

    @contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except self.failures as error:
            self._to = None
            print(f"WARNING: {self.lost}: {self._why(error)}", flush=True)

    def _why(self, error: Exception) -> object:
        return error


class TensorBoard(Sink):
    """Scalars by iteration, Megatron's tags also by samples. Does nothing without --tensorboard-dir."""

    def __init__(self, log: LogConfig) -> None:
        super().__init__(f"no TensorBoard logs from here on, --tensorboard-dir {log.tensorboard_dir}")
        if log.tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter  # a tenth of a second, for those who ask

            with self._trying():
                self._to = SummaryWriter(log.tensorboard_dir, max_queue=log.tensorboard_queue_size)

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None = None) -> None:
        """Write values by tag, and against samples if these are given."""
        with self._trying():  # also for what the writer's thread met since the last call
            for tag, value in values.items() if self._to is not None else ():
                self._to.add_scalar(tag, value, iteration)
                if samples is not None and not tag.startswith(PREFIX):
                    self._to.add_scalar(f"{tag} vs samples", value, samples)

    def close(self) -> None:
        """Flush."""
        with self._trying():
            if self._to is not None:
                self._to.close()


class WeightsAndBiases(Sink):
    """A project of Weights & Biases, an optional package. Does nothing without --wandb-project."""

    def __init__(self, config: Config) -> None:
        super().__init__("nothing goes to Weights & Biases from here on")
        log = config.log
        if not log.wandb_project:
            return
        import wandb

        self.failures = (*self.failures, wandb.Error)
        folder = Path(log.wandb_save_dir or Path(config.checkpoint.save or "", "wandb"))
        settings = {name: value for section in config.sections for name, value in asdict(section).items()}
        with self._trying():
            folder.mkdir(parents=True, exist_ok=True)
            self._to = wandb.init(
                project=log.wandb_project,
                name=log.wandb_exp_name,
                entity=log.wandb_entity,
                dir=str(folder),
                config=settings | {"world_size": config.world_size},
            )

    def scalars(self, values: Mapping[str, float], iteration: int, samples: int | None = None) -> None:
        """Values by tag and, if samples are given, how many were read: Megatron-LM's `samples vs steps`."""
        if self._to is not None:
            with self._trying():
                self._to.log({**values, **({} if samples is None else {"samples vs steps": samples})}, step=iteration)

    def close(self) -> None:
        """Send what is left."""
        if self._to is not None:
            with self._trying():
                self._to.finish()


class MetricsFile(Sink):
    """A line for each step, appended. Does nothing without a path."""

    def __init__(self, path: str | None) -> None:
        super().__init__(f"no metrics from here on, --metrics-file {path}")
        self._file: TextIO | None = None
        self._to = path

    def write(self, values: Mapping[str, Any]) -> None:
        """One object; what is not finite becomes null."""
        if self._to is not None:
            with self._trying():
                self._file = self._file or open(self._to, "a", encoding="utf-8")  # noqa: SIM115
                self._file.write(json.dumps(_finite(values)) + "\n")
                self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # said already: what it still holds could not be written
                self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
