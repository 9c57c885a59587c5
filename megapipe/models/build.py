"""Build a stage and its initial values, which depend only on parameter names and the seed.

A parameter with a Layout is drawn from a random stream of its name. Any other parameter keeps the
values that its module gives it. Those come from torch's global generator, in the order in which
modules are made: they would differ with the rank and the split. So each layer is built a second
time alone, after a seed of its own, and its values are copied. The same is done with the modules
before and after the layers.
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
    """Return the lock of torch's global generator, which all threads share.

    Ranks may be threads; a thread seeds and uses the generator only while it holds the lock.
    """
    return Lock()


def build_stage(
    provider: StageProvider, model: ModelConfig, span: LayerSpan, tp: Axis, seed: int
) -> nn.Module:
    """Return a stage that the provider builds, with initial values, on the device of tp.

    If a parameter has no `Layout`, each layer is also built as a stage of its own, and so are
    embedding and loss. They give their values to the buffers and to parameters without a `Layout`.
    So initial values do not depend on the split into stages.

    Args:
        provider: (config, span, tp) -> the stage.
        model: the model's configuration. span: the layers of the stage.
        tp: the tensor-parallel axis. seed: the seed of all initial values.
    Raises: ConfigError if a layer that is built alone lacks a parameter of this stage, or has it in
        another shape.
    """
    # The fork restores torch's generator afterwards: a user's own draws do not depend on the model.
    with _global_generator(), torch.random.fork_rng(devices=[]):
        module = provider(model, span, tp)
        plain = {
            name for name, param in module.named_parameters() if not hasattr(param, "mesh_layout")
        }
        if plain:
            tensors = _tensors(module)
            # Buffers count too: a module may draw them, and they have no Layout either.
            wanted = {name: x for name, x in tensors.items() if not hasattr(x, "mesh_layout")}
            for piece in _pieces(model, span):
                # Seeded by the piece and not by the stage: any split of the layers gives a layer
                # the same values.
                torch.manual_seed(stream_key(seed, piece.first, piece.embedding, piece.loss))
                _copy_values(wanted, provider(model, piece, tp))
            _check_copied(plain & wanted.keys(), span)
    module = module.to(tp.device)
    # Last: a parameter with a Layout is drawn by its name only.
    initialize(module, seed, tp)
    return module


@torch.no_grad()
def _copy_values(wanted: dict[str, Tensor], piece: nn.Module) -> None:
    """Copy a module's values into the tensors of the same names and shapes.

    Args:
        wanted: {name: tensor without a value yet}. The tensors that get a value are removed.
        piece: the module, a part of the stage that was built alone.
    """
    for name, value in _tensors(piece).items():
        if name in wanted and wanted[name].shape == value.shape:
            wanted.pop(name).copy_(value)


def _check_copied(missing: set[str], span: LayerSpan) -> None:
    if missing:
        last = span.first + span.count - 1
        raise ConfigError(
            f"the model provider makes {min(missing)} for layers {span.first} to {last}, and not, "
            "or in another shape, for one of them alone. A parameter without Layout must depend on "
            "its layer alone: build what span.layers, span.embedding and span.loss say, or give it "
            "a Layout."
        )


def _pieces(model: ModelConfig, span: LayerSpan) -> Iterator[LayerSpan]:
    """Yield the parts of a stage that are built alone for their initial values.

    The parts are each layer, the embedding and the loss. Embedding and loss are built with one
    layer each, whose values are not used.

    Args:
        span: the layers of the stage, and whether it has embedding or loss.
    """
    for layer in span.layers:
        yield LayerSpan(layer, 1, False, False, depth=span.depth)
    if span.embedding:
        yield LayerSpan(0, 1, True, False)
    if span.loss:
        yield LayerSpan(model.layers - 1, 1, False, True)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def stage_module(config: Config, provider: StageProvider, span: LayerSpan, tp: Axis) -> nn.Module:
    """Return a stage ready for training: in its dtype, and frozen or compiled as the flags say.

    Args:
        provider: (config, span, tp) -> the stage. span: its layers.
    Raises: ConfigError if --compile or --offload-modules is given and the stage has layers, but
        none of them is a TransformerLayer. ConfigError as `build_stage`.
    """
    module = build_stage(provider, config.model, span, tp, config.batch.seed)
    if config.optimizer.freeze_all_layers:
        module.requires_grad_(False)
    if config.precision.half:
        # Only now: the initial values are float32 numbers, rounded once.
        dtype = torch.bfloat16 if config.precision.bf16 else torch.float16
        module = module.to(dtype)
    names = config.parallel.offload_modules
    if names and not name_modules(module) and span.count:
        raise ConfigError(
            f"--offload-modules {' '.join(names)} names layers of megapipe, and this model has "
            "others. Leave it out."
        )
    if config.model.compile and not compile_layers(module) and span.count:
        raise ConfigError(
            "--compile compiles the layers of megapipe, and this model has others. Leave it out."
        )
    return module
