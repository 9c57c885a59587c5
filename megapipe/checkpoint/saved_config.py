"""The configuration that a checkpoint keeps, for those who continue with its architecture.

A checkpoint may come from anyone, so what it says is data: the name of a model provider in it is shown and never
imported. Which code builds the model is said on the command line alone.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megapipe.checkpoint import commit
from megapipe.checkpoint.resume import FREE, RULES, saved_fields
from megapipe.checkpoint.save_load import STATE, find_checkpoint
from megapipe.config import KINDS, CheckpointConfig, Config, ModelConfig
from megapipe.config.layers import parse_overrides
from megapipe.config.notes import Range, Required, note_of
from megapipe.errors import CheckpointError, ConfigError

Look = Callable[[CheckpointConfig], Path | None]


def saved_config(folder: Path) -> Config:
    """The model, training and data flags of the run that wrote a checkpoint; all others at their defaults.

    `model_provider` is left out: see `require_provider`.

    Raises: CheckpointError if its state.json cannot be read.
    """
    saved = _read(folder)
    try:
        # Which layers and kernels computed it says nothing of the model; here may be no GPU.
        elsewhere = {
            "transformer_impl": "local",
            "attention_backend": "auto",
            "model_provider": None,
        }
        return _sound(Config().with_fields(**_known(saved_fields(saved)) | elsewhere))
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError):
        raise _damaged(folder) from None


def saved_provider(folder: Path) -> str | None:
    """The --model-provider of the run that wrote a checkpoint, as a shell takes it; to be shown, never imported."""
    try:
        name = _read(folder)["model"].get("model_provider")
    except (KeyError, AttributeError):
        raise _damaged(folder) from None
    if name is None:
        return None
    return shlex.quote(str(name)) if str(name).isprintable() else ascii(name)


def require_provider(folder: Path, given: str | None) -> None:
    """Raises: CheckpointError if another program than ours built the model and the command line names none."""
    if given is None and (name := saved_provider(folder)) is not None:
        raise CheckpointError(
            f"{folder.name} was made with --model-provider {name}. A checkpoint cannot choose which code runs: if you "
            f"trust that program, add --model-provider {name}"
        )


def with_checkpoint_args(config: Config, look: Look = find_checkpoint) -> Config:
    """--use-checkpoint-args: the architecture of the checkpoint to load, whatever the flags say of it.

    Dropout comes with it, as in Megatron-LM, and the router's type where no flag gives one. Flags that say how the same
    model is computed or initialised stay, and so does --model-provider.

    While --load holds no checkpoint yet the flags are all there is, as in the first run of a script that resumes.

    Args:
        look: finds the checkpoint to load; one that remembers it, where it is asked again.
    Raises: ConfigError without --load; CheckpointError as `require_provider`.
    """
    if not config.checkpoint.use_checkpoint_args:
        return config
    if config.checkpoint.load is None:
        raise ConfigError("--use-checkpoint-args needs --load")
    folder = look(config.checkpoint)
    if folder is None:
        return config
    saved = saved_config(folder).model
    require_provider(folder, config.model.model_provider)
    also = {"padded_vocab_size", "attention_dropout", "hidden_dropout"}
    taken = {field.name for field in dataclasses.fields(ModelConfig)} - FREE | also
    values = {name: getattr(saved, name) for name in taken}
    values["moe_router_dtype"] = config.model.moe_router_dtype or saved.moe_router_dtype
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **values))


def _read(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / STATE).read_text())["config"]
    except OSError as error:
        commit.read_manifest(folder)  # says what kind of folder this is, if it is none of ours
        raise CheckpointError(f"{folder / STATE}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(folder) from None
    if (folder / commit.MANIFEST).exists():
        files = commit.read_manifest(folder)
        commit.verify(
            folder, files, files.keys() & {STATE}
        )  # another number may be a model of another kind
    return config


def _damaged(folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder / STATE} is not the state of a run")


def _known(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of our fields. Raises: TypeError for one that its field never had."""
    found = {name: value for name, value in values.items() if name in RULES}
    if odd := [name for name, value in found.items() if not _fits(KINDS[name], value)]:
        raise TypeError(", ".join(odd))
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
    }


def _sound(config: Config) -> Config:
    """Raises: ValueError for sizes that no run has, of the model, which is built before anything else looks at them."""
    ranges, required = note_of(ModelConfig, Range), note_of(ModelConfig, Required)
    for name, value in vars(config.model).items():
        if name in required if value is None else name in ranges and ranges[name].problem(value):
            raise ValueError(name)
    if (text := config.model.per_layer_overrides) is not None:
        parse_overrides(text, config.model.layers)
    return config


def _fits(hint: Any, value: object) -> bool:
    kinds = get_args(hint)
    if get_origin(hint) is Literal:
        return value in kinds
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(kinds[0], x) for x in value)
    if kinds:  # one of several
        return any(_fits(kind, value) for kind in kinds)
    return type(value) is hint or (hint is float and type(value) is int)
