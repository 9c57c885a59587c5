"""Experts of a dense model's MLPs (Komatsuzaki et al. 2023; in slices, He et al. 2024), which begin as that model.

Of G slices of an MLP, each E/G times, a token takes k. Slices of one copy have one row of the router, so that they are
chosen together; their weights add up to 1 over all k. So the sum is the MLP's if fc2 counts G times.
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
from megapipe.convert.tensors import SavedTensors, is_trained, our_layouts
from megapipe.distributed.layout import Layout
from megapipe.errors import CheckpointError
from megapipe.models.gpt import WORD_EMBEDDINGS
from megapipe.tensor_parallel.rng import initial


def dense_model(config: Config) -> ModelConfig:
    """The model whose checkpoint is to be there."""
    model = config.model
    return replace(model, num_experts=None, ffn_hidden_size=model.ffn * config.checkpoint.moe_upcycling_granularity)


def refuse_upcycling(folder: Path, config: Config) -> None:
    """Raises: CheckpointError if a checkpoint is not of that model."""
    saved = saved_config(folder)
    if saved.model.has_experts:
        raise CheckpointError(f"{folder} has experts already. Leave out --moe-use-upcycling.")
    if (provider := saved_provider(folder)) is not None:
        raise CheckpointError(
            f"{folder} was made with --model-provider {provider}: which of its tensors are MLPs is not known. "
            "Leave out --moe-use-upcycling."
        )
    if problems := resume_problems(vars(saved.model), None, replace(config, model=dense_model(config)), folder.name):
        width = f"--ffn-hidden-size {config.model.ffn} x --moe-upcycling-granularity "
        made = f"experts are to be made of MLPs of {width}{config.checkpoint.moe_upcycling_granularity}"
        raise CheckpointError([f"{problem} ({made})" if "ffn" in problem else problem for problem in problems])


@torch.no_grad()
def upcycle(folder: Path, target: Path, config: Config) -> Path:
    """The weights of a dense checkpoint as those of a model with experts, in TARGET/iter_0000000.

    Args:
        folder: iter_NNNNNNN of our own GPT.
        config: of the run that begins: its model, granularity and seed, by which routers are drawn.
    Raises: CheckpointError if the checkpoint is of another model.
    """
    refuse_upcycling(folder, config)
    saved = SavedTensors(folder)
    dtype = saved.dtypes[WORD_EMBEDDINGS]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, layout in our_layouts(config.model).items():
            if layout.tied_to is None:
                yield name, _made(name, layout, saved.read, config).to(dtype if is_trained(name) else torch.float32)

    return write_checkpoint(target, config, tensors())


def _made(name: str, layout: Layout, read: Callable[[str], Tensor], config: Config) -> Tensor:
    """A whole tensor of the model with experts."""
    before, sparse, inner = name.partition(".mlp.experts.")
    model = config.model
    slices = dense_model(config).ffn // model.expert_ffn
    if name.endswith("router.weight"):
        return initial(name, layout, config.batch.seed)[: model.experts // slices].repeat_interleave(slices, 0)
    if ".mlp.router." in name:
        return torch.zeros(layout.full)
    if not sparse:
        return read(name)
    x = read(f"{before}.mlp.{inner}")
    copies = model.experts // slices
    scale = 1 / (model.moe_router_topk_scaling_factor or 1.0)
    if inner == "linear_fc2.bias":  # it counts as much as its expert, and so once in all
        return (x * scale).expand(model.experts, -1)
    second = inner == "linear_fc2.weight"
    parts = torch.stack(x.chunk(slices, 1 if second else int(model.gated)))
    return (parts * (slices * scale) if second else parts).repeat(copies, *[1] * x.ndim)
