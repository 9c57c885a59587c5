"""The scalars of TensorBoard in a project of Weights & Biases, an optional package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megapipe.config import Config


class WeightsAndBiases:
    """A run there. Does nothing without --wandb-project; what fails costs one warning, never the run."""

    def __init__(self, config: Config) -> None:
        self._run: Any = None
        log = config.log
        if not log.wandb_project:
            return
        import wandb

        self._failures = (OSError, wandb.Error)
        folder = Path(log.wandb_save_dir or Path(config.checkpoint.save or "", "wandb"))
        settings = {name: value for section in config.sections for name, value in asdict(section).items()}
        with self._warning():
            folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=log.wandb_project,
                name=log.wandb_exp_name,
                entity=log.wandb_entity,
                dir=str(folder),
                config=settings | {"world_size": config.world_size},
            )

    def scalars(self, values: Mapping[str, float | None], iteration: int, samples: int | None = None) -> None:
        """Those that are there, and, if samples are given, how many were read: Megatron-LM's `samples vs steps`."""
        if self._run is not None:
            there = {tag: value for tag, value in {**values, "samples vs steps": samples}.items() if value is not None}
            with self._warning():
                self._run.log(there, step=iteration)

    def close(self) -> None:
        """Send what is left."""
        if self._run is not None:
            with self._warning():
                self._run.finish()

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            self._run = None
            print(f"WARNING: nothing goes to Weights & Biases from here on: {error}", flush=True)
