"""Turn the MLPs of a dense model into experts, so that the new model begins as the dense one.

Sparse upcycling: Komatsuzaki et al. 2023; with slices of the MLP, He et al. 2024.

An MLP is cut in G slices, and each slice is copied E/G times. A token takes k experts. The slices
of one copy have equal rows of the router, so that they are chosen together. The weights of the k
experts add up to 1, and a copy has G experts. So their sum is the MLP if fc2 is multiplied by G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megapipe.checkpoint.resume import resume_problems
from megapipe.checkpoint.saved_config import saved_config, saved_provider
from megapipe.config import Config, ModelConfig
from megapipe.convert.checkpoints import write_checkpoint
from megapipe.convert.tensors import SavedTensors, our_layouts, saved_dtype
from megapipe.distributed.layout import Layout
from megapipe.errors import CheckpointError
from megapipe.models.gpt import WORD_EMBEDDINGS
from megapipe.tensor_parallel.rng import initial


def dense_model(config: Config) -> ModelConfig:
    """Return the dense model from whose checkpoint a run with --moe-use-upcycling begins."""
    model = config.model
    width = model.ffn * config.checkpoint.moe_upcycling_granularity
    return replace(model, num_experts=None, ffn_hidden_size=width)


def refuse_upcycling(folder: Path, config: Config) -> None:
    """Refuse a checkpoint that is not of the dense model from which the run begins.

    Args:
        folder: iter_NNNNNNN.
        config: configuration of the run that begins, with experts.
    Raises: CheckpointError for a checkpoint of another model.
    """
    saved = saved_config(folder)
    if saved.model.has_experts:
        raise CheckpointError(f"{folder} has experts already. Leave out --moe-use-upcycling.")
    if (provider := saved_provider(folder)) is not None:
        raise CheckpointError(
            f"{folder} was made with --model-provider {provider}, and nothing says which tensors "
            "are MLPs. Leave out --moe-use-upcycling."
        )
    expected = replace(config, model=dense_model(config))
    problems = resume_problems(vars(saved.model), None, expected, folder.name)
    # A width that does not fit needs an explanation: the user gave two numbers for it.
    pieces = config.checkpoint.moe_upcycling_granularity
    width = f"--ffn-hidden-size {config.model.ffn} x --moe-upcycling-granularity {pieces}"
    for n, line in enumerate(problems):
        if "ffn" in line:
            problems[n] = f"{line} (experts are to be made of MLPs of {width})"
    if problems:
        raise CheckpointError(problems)


@torch.no_grad()
def upcycle(folder: Path, target: Path, config: Config) -> Path:
    """Write a dense checkpoint's weights as a model with experts to TARGET/iter_0000000.

    Args:
        folder: iter_NNNNNNN of megapipe's own GPT.
        target: the folder in which the new checkpoint's folder is made.
        config: configuration of the run that begins. This configuration's seed draws the routers'
            weights.

    Returns: the new checkpoint's folder.

    Raises: CheckpointError if the checkpoint is another model's.
    """
    refuse_upcycling(folder, config)
    saved = SavedTensors(folder)
    dtype = saved.dtypes[WORD_EMBEDDINGS]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, layout in our_layouts(config.model).items():
            if layout.tied_to is None:
                tensor = _made(name, layout, saved.read, config)
                yield name, tensor.to(saved_dtype(name, dtype))

    return write_checkpoint(target, config, tensors())


def _made(name: str, layout: Layout, read: Callable[[str], Tensor], config: Config) -> Tensor:
    """Return a whole tensor of the model with experts, made from the dense model's tensors.

    Args:
        name: name of the tensor.
        layout: the tensor's layout.
        read: returns the dense model's tensor of a name.
        config: configuration of the run that begins. This configuration's seed draws the routers'
            weights.
    """
    model = config.model
    slices = dense_model(config).ffn // model.expert_ffn
    copies = model.experts // slices
    before, sparse, inner = name.partition(".mlp.experts.")
    if name.endswith("router.weight"):
        # A row for each copy, repeated for its slices, so that a token chooses a whole copy.
        rows = initial(name, layout, config.batch.seed)[:copies]
        return rows.repeat_interleave(slices, 0)
    if ".mlp.router." in name:
        return torch.zeros(layout.full)
    # All other tensors are the dense model's: attention, norms, embedding, MLPs without experts.
    if not sparse:
        return read(name)
    x = read(f"{before}.mlp.{inner}")
    scale = 1 / (model.moe_router_topk_scaling_factor or 1.0)
    if inner == "linear_fc2.bias":
        # Each expert adds it with the expert's weight, and the weights add up to 1.
        return (x * scale).expand(model.experts, -1)
    # Slices of the MLP's inner dimension: columns of fc2, rows of fc1 after gate and up.
    if inner == "linear_fc2.weight":
        parts = torch.stack(x.chunk(slices, 1)) * (slices * scale)
    else:
        parts = torch.stack(x.chunk(slices, int(model.gated)))
    return parts.repeat(copies, *[1] * x.ndim)
