"""A stage with its initial values: each follows from its name and the seed, wherever it lies and whoever builds it.

A parameter with a Layout is drawn from the stream of its name. Any other keeps the values that its module gives it, and
those come from torch's global generator in the order in which the modules of a stage are made: another on each rank and
under each split. So each layer, and what stands before and after the layers, is made once more by itself after a seed
of its own, and its values are taken over.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from threading import Lock

import torch
from torch import Tensor, nn

from megapipe.config import Config, ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.models.layer import compile_layers, name_modules
from megapipe.models.provider import StageProvider
from megapipe.partition.spans import LayerSpan
from megapipe.tensor_parallel.rng import initialize, stream_key


@cache
def _global_generator() -> Lock:
    """The lock of torch's generator, of which there is one for all threads: who holds it may seed and use it."""
    return Lock()


def build_stage(provider: StageProvider, model: ModelConfig, span: LayerSpan, tp: Axis, seed: int) -> nn.Module:
    """The provider's stage with initial values, on the device of tp.

    Raises: ConfigError if the provider does not make a parameter without Layout where its layer is made by itself.
    """
    with _global_generator(), torch.random.fork_rng(devices=[]):
        module = provider(model, span, tp)
        if plain := {name for name, param in module.named_parameters() if not hasattr(param, "mesh_layout")}:
            wanted = {name: x for name, x in _tensors(module).items() if not hasattr(x, "mesh_layout")}
            for piece in _pieces(model, span):
                torch.manual_seed(stream_key(seed, piece.first, piece.embedding, piece.loss))
                _take_over(wanted, provider(model, piece, tp))
            _check_taken(plain & wanted.keys(), span)
    module = module.to(tp.device)
    initialize(module, seed, tp)
    return module


@torch.no_grad()
def _take_over(wanted: dict[str, Tensor], piece: nn.Module) -> None:
    for name, value in _tensors(piece).items():
        if name in wanted and wanted[name].shape == value.shape:
            wanted.pop(name).copy_(value)


def _check_taken(missing: set[str], span: LayerSpan) -> None:
    if missing:
        raise ConfigError(
            f"the model provider makes {min(missing)} for layers {span.first} to {span.first + span.count - 1}, and "
            "not, or in another shape, for one of them alone. A parameter without Layout must depend on its layer "
            "alone: build what span.layers, span.embedding and span.loss say, or give it a Layout."
        )


def _pieces(model: ModelConfig, span: LayerSpan) -> Iterator[LayerSpan]:
    """Pieces that a span is made of; a layer belongs to the piece that is that layer alone."""
    yield from (LayerSpan(layer, 1, False, False, depth=span.depth) for layer in span.layers)
    if span.embedding:
        yield LayerSpan(0, 1, True, False)
    if span.loss:
        yield LayerSpan(model.layers - 1, 1, False, True)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def stage_module(config: Config, provider: StageProvider, span: LayerSpan, tp: Axis) -> nn.Module:
    """A stage as it is trained: of its type, compiled or frozen as the flags say.

    Raises: ConfigError for --compile, or --offload-modules, of a model with other layers than ours.
    """
    train = config.train
    module = build_stage(provider, config.model, span, tp, train.seed)
    if train.freeze_all_layers:
        module.requires_grad_(False)
    if train.half:
        module = module.to(torch.bfloat16 if train.bf16 else torch.float16)
    if (names := config.parallel.offload_modules) and not name_modules(module) and span.count:
        raise ConfigError(
            f"--offload-modules {' '.join(names)} is of the layers of megapipe, and this model has others. "
            "Leave it out."
        )
    if train.compile and not compile_layers(module) and span.count:
        raise ConfigError("--compile compiles the layers of megapipe, and this model has others. Leave it out.")
    return module
