"""The configuration that a checkpoint keeps, for those who continue with its architecture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megapipe.config import Config, DataConfig, ModelConfig, TrainConfig
from megapipe.errors import CheckpointError, ConfigError
from megapipe.training.checkpoint import STATE, find_checkpoint
from megapipe.training.resume import FREE


def saved_config(folder: Path) -> Config:
    """The model, training and data flags of the run that wrote a checkpoint; all others at their defaults.

    Raises: CheckpointError if its state.json cannot be read.
    """
    try:
        saved = json.loads((folder / STATE).read_text())["config"]
        return Config(
            # Which layers computed it says nothing of the model; here may be no GPU.
            model=dataclasses.replace(_known(ModelConfig, saved["model"]), transformer_impl="local"),
            train=_known(TrainConfig, saved["train"]),
            data=_known(DataConfig, saved["data"]),
        )
    except OSError as error:
        raise CheckpointError(f"{folder / STATE}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{folder / STATE} is not the state of a run") from None


def with_checkpoint_args(config: Config) -> Config:
    """--use-checkpoint-args: the architecture of the checkpoint to load, whatever the flags say of it.

    Dropout comes with it, as in Megatron-LM; flags that say how the same model is computed or initialised stay.

    While --load holds no checkpoint yet the flags are all there is, as in the first run of a script that resumes.

    Raises: ConfigError without --load.
    """
    if not config.checkpoint.use_checkpoint_args:
        return config
    if config.checkpoint.load is None:
        raise ConfigError("--use-checkpoint-args needs --load")
    folder = find_checkpoint(config.checkpoint)
    if folder is None:
        return config
    saved = saved_config(folder).model
    also = {"padded_vocab_size", "model_provider", "attention_dropout", "hidden_dropout"}
    taken = {field.name for field in dataclasses.fields(ModelConfig)} - FREE | also
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, **{name: getattr(saved, name) for name in taken})
    )


def _known(cls: type[Any], values: dict[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names})
