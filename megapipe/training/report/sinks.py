"""Write a run's numbers to boards, and to a file with a JSON line for every step."""

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
    """An output for numbers. The first failure prints one warning, and nothing is written after it.

    A failure never ends the run. Subclasses write inside the context `_trying()`.

    Attributes:
        lost: the beginning of the warning, before the error.
        failures: the errors that are caught.
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
            # Nothing is tried again: a warning in every step would hide the log.
            self._to = None
            print(f"WARNING: {self.lost}: {self._reason(error)}", flush=True)

    def _reason(self, error: Exception) -> object:
        return error


class TensorBoard(Sink):
    """A TensorBoard file: scalars by iteration, and Megatron's tags also by samples.

    `scalars` writes values, `close` flushes them. Does nothing without --tensorboard-dir.
    """

    def __init__(self, log: LogConfig) -> None:
        folder = log.tensorboard_dir
        super().__init__(f"no TensorBoard logs from here on, --tensorboard-dir {folder}")
        if folder is not None:
            # The import takes a tenth of a second.
            from torch.utils.tensorboard import SummaryWriter

            with self._trying():
                self._to = SummaryWriter(folder, max_queue=log.tensorboard_queue_size)

    def scalars(
        self, values: Mapping[str, float], iteration: int, samples: int | None = None
    ) -> None:
        """Write values, {tag: value}, against the iteration.

        samples: number of samples so far; Megatron's tags are then written against this number too.
            None writes against the iteration only.
        """
        if self._to is None:
            return
        # The call also raises errors that the writer's thread met since the last one.
        with self._trying():
            for tag, value in values.items():
                self._to.add_scalar(tag, value, iteration)
                # Only Megatron-LM's tags have a second form.
                if samples is not None and not tag.startswith(PREFIX):
                    self._to.add_scalar(f"{tag} vs samples", value, samples)

    def close(self) -> None:
        """Flush and close the file."""
        if self._to is not None:
            with self._trying():
                self._to.close()


class WeightsAndBiases(Sink):
    """A project of Weights & Biases, which is an optional package.

    `scalars` sends values, `close` the remaining ones. Does nothing without --wandb-project.
    """

    def __init__(self, config: Config) -> None:
        super().__init__("nothing goes to Weights & Biases from here on")
        log = config.log
        if not log.wandb_project:
            return
        # Optional: only a run that asks for it needs the package.
        import wandb

        self.failures = (*self.failures, wandb.Error)
        folder = Path(log.wandb_save_dir or Path(config.checkpoint.save or "", "wandb"))
        settings: dict[str, Any] = {}
        for section in config.sections:
            settings |= asdict(section)
        settings["world_size"] = config.world_size
        with self._trying():
            folder.mkdir(parents=True, exist_ok=True)
            self._to = wandb.init(
                project=log.wandb_project,
                name=log.wandb_exp_name,
                entity=log.wandb_entity,
                dir=str(folder),
                config=settings,
            )

    def scalars(
        self, values: Mapping[str, float], iteration: int, samples: int | None = None
    ) -> None:
        """Send values for the iteration.

        Args:
            values: {tag: value}.
            iteration: the iteration.
            samples: number of samples so far, which Megatron-LM's tag `samples vs steps` shows;
                None leaves the tag out.
        """
        if self._to is None:
            return
        row = dict(values)
        if samples is not None:
            row["samples vs steps"] = samples
        with self._trying():
            self._to.log(row, step=iteration)

    def close(self) -> None:
        """Send the remaining values."""
        if self._to is not None:
            with self._trying():
                self._to.finish()


class MetricsFile(Sink):
    """A file to which `write` appends one line for each step. Does nothing without a path."""

    def __init__(self, path: str | None) -> None:
        super().__init__(f"no metrics from here on, --metrics-file {path}")
        self._file: TextIO | None = None
        self._to = path

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one JSON object; numbers that are not finite become null.

        Args:
            values: {key: number} of a step.
        """
        if self._to is None:
            return
        with self._trying():
            if self._file is None:
                # Appends: a resumed run goes on in the same file.
                self._file = open(self._to, "a", encoding="utf-8")  # noqa: SIM115
            self._file.write(json.dumps(_finite(values)) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            # A failure was reported when the line was written.
            with suppress(OSError):
                self._file.close()


def _finite(value: Any) -> Any:
    """Return a JSON value in which every number that is not finite is None."""
    if isinstance(value, Mapping):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    # JSON has no NaN. Python would write one, and other readers would refuse the line.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
