"""The configuration in a checkpoint, for a run that continues with its architecture.

A checkpoint may come from anyone, so its content is data. The name of a model provider in it is
shown and never imported: the command line alone says which code builds the model.
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
    """Return the flags of the run that wrote a checkpoint.

    A flag that the checkpoint lacks, such as one of an older version, has its default. A field that
    this version does not know is left out. `model_provider` is None, because no checkpoint may name
    code to run. Layers and attention are of plain torch, because the kernels of the run may not be
    here.

    Raises: CheckpointError if state.json cannot be read, was changed, or has values that no flag
        takes.
    """
    saved = _read(folder)
    try:
        # Its layers and kernels say nothing of the model, and may need a GPU that is not here.
        elsewhere = {
            "transformer_impl": "local",
            "attention_backend": "auto",
            "model_provider": None,
        }
        return _sound(Config().with_fields(**_known(saved_fields(saved)) | elsewhere))
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError):
        raise _damaged(folder) from None


def saved_provider(folder: Path) -> str | None:
    """Return the --model-provider of the run that wrote a checkpoint.

    The value is quoted for a shell, to be shown and never imported. None if megapipe's own GPT was
    trained.

    Raises: CheckpointError if state.json is missing, damaged or not as the manifest says.
    """
    try:
        name = _read(folder)["model"].get("model_provider")
    except (KeyError, AttributeError):
        raise _damaged(folder) from None
    if name is None:
        return None
    # An escape sequence could change other lines of a terminal.
    if not str(name).isprintable():
        return ascii(name)
    return shlex.quote(str(name))


def require_provider(folder: Path, given: str | None) -> None:
    """Check that the command line names a model provider if the checkpoint has one.

    Args:
        folder: the checkpoint.
        given: --model-provider of the command line; None without it.
    Raises: CheckpointError if only the checkpoint has one.
    """
    if given is not None:
        return
    name = saved_provider(folder)
    if name is not None:
        raise CheckpointError(
            f"{folder.name} was made with --model-provider {name}. A checkpoint cannot choose "
            f"which code runs: if you trust that program, add --model-provider {name}"
        )


def with_checkpoint_args(config: Config, look: Look = find_checkpoint) -> Config:
    """Return the flags, with the model's architecture taken from the checkpoint to load.

    This is --use-checkpoint-args; without it, or without a checkpoint, the flags are returned
    unchanged. Sizes such as --num-layers come from the checkpoint, and so does dropout, as in
    Megatron-LM. So does --moe-router-dtype unless it is given. Flags on which the weights do not
    depend, such as --attention-backend, come from the command line.

    Args:
        config: the flags of the command line.
        look: a function that returns the checkpoint to load; None if there is none.
    Raises: ConfigError without --load; CheckpointError if the checkpoint needs a --model-provider
        that the command line does not give.
    """
    if not config.checkpoint.use_checkpoint_args:
        return config
    if config.checkpoint.load is None:
        raise ConfigError("--use-checkpoint-args needs --load")
    # In the first run of a script that resumes --load holds no checkpoint yet.
    folder = look(config.checkpoint)
    if folder is None:
        return config
    saved = saved_config(folder).model
    require_provider(folder, config.model.model_provider)
    taken = {field.name for field in dataclasses.fields(ModelConfig)} - FREE
    taken |= {"padded_vocab_size", "attention_dropout", "hidden_dropout"}
    values = {name: getattr(saved, name) for name in taken}
    values["moe_router_dtype"] = config.model.moe_router_dtype or saved.moe_router_dtype
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **values))


def _read(folder: Path) -> dict[str, Any]:
    """Return the saved configuration as JSON: section -> name -> value.

    Raises: CheckpointError if state.json is missing, damaged or not as the manifest says.
    """
    try:
        config: dict[str, Any] = json.loads((folder / STATE).read_text())["config"]
    except OSError as error:
        # Raises, and says which kind of folder this is, if it is no checkpoint of ours.
        commit.read_manifest(folder)
        raise CheckpointError(f"{folder / STATE}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(folder) from None
    if (folder / commit.MANIFEST).exists():
        # One changed digit may be another model, which nothing later would notice.
        files = commit.read_manifest(folder)
        commit.verify(folder, files, files.keys() & {STATE})
    return config


def _damaged(folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder / STATE} is not the state of a run")


def _known(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of this version's configuration, with lists as tuples.

    Args:
        values: the saved values of all sections, by name.
    Raises: TypeError for a value of a type that its field never had.
    """
    found = {name: value for name, value in values.items() if name in RULES}
    for name, value in found.items():
        if not _fits(KINDS[name], value):
            raise TypeError(name)
        # JSON has no tuples.
        if isinstance(value, list):
            found[name] = tuple(value)
    return found


def _sound(config: Config) -> Config:
    """Check the sizes of a model, and return the configuration unchanged.

    Raises: ValueError if a size of the model is missing or outside its range.
    """
    # The model is built before anything else checks them.
    ranges = note_of(ModelConfig, Range)
    required = note_of(ModelConfig, Required)
    for name, value in vars(config.model).items():
        if value is None and name in required:
            raise ValueError(name)
        if value is not None and name in ranges and ranges[name].problem(value):
            raise ValueError(name)
    text = config.model.per_layer_overrides
    if text is not None:
        parse_overrides(text, config.model.layers)
    return config


def _fits(hint: Any, value: object) -> bool:
    """Return whether a value that was read from JSON is of a field's type.

    Args:
        hint: the type, such as `int | None`.
    """
    kinds = get_args(hint)
    if get_origin(hint) is Literal:
        return value in kinds
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(kinds[0], x) for x in value)
    # A union.
    if kinds:
        return any(_fits(kind, value) for kind in kinds)
    # Not isinstance: a bool is an int.
    return type(value) is hint or (hint is float and type(value) is int)
