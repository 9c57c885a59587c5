"""What builds a stage. A model of your own is one function, given to `pretrain` or named by --model-provider.

Two signatures are understood: ours, and Megatron-LM's model_provider(pre_process, post_process, vp_stage).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from torch import nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.models.gpt import GPTModel
from megapipe.pipeline_parallel.partition import LayerSpan

StageProvider = Callable[[ModelConfig, LayerSpan, Axis], nn.Module]
"""(architecture, the stage's share of it, tensor-parallel axis) -> the stage, its parameters not yet initialised."""
Provider = Callable[..., nn.Module]
"""A StageProvider, or Megatron-LM's."""
FLAG = "--model-provider"


def gpt_provider(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
    """Our GPT."""
    return GPTModel(config, span, tp)


def stage_provider(provider: Provider, own: Sequence[LayerSpan] = ()) -> StageProvider:
    """The same provider with our signature.

    Args:
        provider: a StageProvider, or a function with a parameter `pre_process`. The latter is called by keywords, with
            those of these that it names: pre_process, post_process, vp_stage, config, span, tp.
        own: the spans of this rank's stages, which vp_stage counts; None is passed where there is but one.
    """
    names = inspect.signature(provider).parameters
    if "pre_process" not in names:
        return provider

    def adapted(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
        chunk = own.index(span) if len(own) > 1 and span in own else None
        given = {
            "pre_process": span.embedding,
            "post_process": span.loss,
            "vp_stage": chunk,
            "config": config,
            "span": span,
            "tp": tp,
        }
        return provider(**{name: value for name, value in given.items() if name in names})

    return adapted


def find_provider(name: str) -> Provider:
    """The function that MODULE:NAME or FILE.py:NAME names.

    Raises: ConfigError if there is no such module or function, or it takes other arguments.
    """
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function:
        raise ConfigError(f"{FLAG} {name} is not MODULE:NAME, such as my_model:provider or path/my_model.py:provider")
    module = _import(where, name)
    found = getattr(module, function, None)
    if not callable(found):
        near = difflib.get_close_matches(function, [n for n, v in vars(module).items() if callable(v)], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{FLAG} {name}: {where} has no function {function}{hint}")
    signature = inspect.signature(found)
    try:
        if "pre_process" not in signature.parameters:
            signature.bind(None, None, None)
    except TypeError:
        raise ConfigError(
            f"{FLAG} {name} takes {signature}, but a provider takes (config, span, tp) or (pre_process, post_process, "
            "vp_stage=None)"
        ) from None
    return found  # type: ignore[no-any-return]


def _import(where: str, name: str) -> ModuleType:
    try:
        if where.endswith(".py"):
            return _load_file(Path(where))
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # where the user is, not only where the script lies
        return importlib.import_module(where)
    except (ImportError, SyntaxError, OSError) as error:
        file = f"{where.replace('.', '/')}.py:{name.rpartition(':')[2]}"
        remedy = "" if where.endswith(".py") else f". The file can be named too: {FLAG} path/to/{file}"
        raise ConfigError(f"{FLAG} {name}: cannot import {where}: {error}{remedy}") from None


def _load_file(path: Path) -> ModuleType:
    name = f"provider_{path.stem}"  # not the stem: a file json.py must not take the place of json
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
