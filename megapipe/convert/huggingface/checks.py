"""Checks that it is the same model: names and shapes before a conversion, logits after it, and what means another."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.depths import HEAD, copies
from megapipe.convert.huggingface.mapping import BUFFERS, Tensors
from megapipe.convert.tensors import SavedTensors, load_full, our_shapes, whole_model
from megapipe.distributed.axis import Axis
from megapipe.errors import CheckpointError
from megapipe.models.gpt import WORD_EMBEDDINGS, GPTModel

Shape = tuple[int, ...]
_ALL_TOKENS: dict[str, Any] = {
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_router_force_load_balancing": False,
}
"""Settings under which every token reaches the experts that its router chooses, as in transformers."""
PUBLISHED = 61
"""Layers of DeepSeek-V3, whose depth's name transformers has in a list."""


def check_theirs(table: Sequence[Tensors], saved: SavedTensors, model: ModelConfig) -> None:
    """Check that every tensor of theirs is used once and has the shape that ours is taken apart into.

    Raises: CheckpointError with every tensor that is missing, left over or of another shape.
    """
    used = {key for rule in table for key in rule.theirs}
    missing = sorted(used - saved.shapes.keys())
    rest = {key for key in saved.shapes.keys() - used if not BUFFERS.fullmatch(key)}
    rest -= copies(model).keys()
    embedding = next(rule.theirs[0] for rule in table if rule.ours == WORD_EMBEDDINGS)
    # Some tied models are saved with their head all the same.
    if model.tied and HEAD in rest and embedding in saved.shapes and _equal(saved, HEAD, embedding):
        rest.remove(HEAD)
    problems = _listing(f"{saved.folder}: config.json asks for tensors that are missing:", missing)
    problems += _listing(
        f"{saved.folder}: tensors that config.json knows nothing of:", sorted(rest)
    )
    shapes = our_shapes(model)
    for rule in table:
        # Joining is no test: parts are laid together by views, which ask for the number of elements alone.
        for key, part in zip(
            rule.theirs, rule.split(torch.empty(shapes[rule.ours], device="meta")), strict=True
        ):
            if saved.shapes.get(key, part.shape) != tuple(part.shape):
                problems.append(
                    f"{key} is {list(saved.shapes[key])}, but config.json means {list(part.shape)}"
                )
    if problems:
        raise CheckpointError(problems)


def check_ours(saved: SavedTensors, model: ModelConfig, name: str) -> None:
    """Raises: CheckpointError unless a checkpoint has the tensors of its model, all of them and no other."""
    check_names(
        name,
        our_shapes(model),
        {key: x for key, x in saved.shapes.items() if not key.startswith("optimizer.")},
    )


def check_names(
    name: str,
    needed: Mapping[str, Shape],
    there: Mapping[str, Shape],
    forms: Callable[[Shape], Sequence[Shape]] = lambda shape: (shape,),
) -> None:
    """Raises: CheckpointError with every tensor that is missing, left over or of another shape. forms: of a shape."""
    problems = _listing("lacks", [key for key in needed if key not in there])
    problems += _listing(
        "has what its arguments do not mean,", [key for key in there if key not in needed]
    )
    problems += [
        f"{key} is {list(there[key])}, but its arguments mean {list(shape)}"
        for key, shape in needed.items()
        if key in there and there[key] not in forms(shape)
    ]
    if problems:
        raise CheckpointError([f"{name}: {problem}" for problem in problems])


def other_copies(saved: SavedTensors, model: ModelConfig) -> Iterator[str]:
    """Notes on copies of embedding and head in depths of multi-token prediction that are not like them."""
    for copy, its in copies(model).items():
        if copy in saved.shapes and not (
            saved.shapes[copy] == saved.shapes[its] and _equal(saved, copy, its)
        ):
            yield f"{copy} is left out, though it is not as {its}, which depths share"


def notes(content: Mapping[str, Any], model: ModelConfig, vocab_size: int) -> Iterator[str]:
    """Notes on what changes its meaning without a word between the two (and Megatron-LM)."""
    if not model.gated:
        form = "erf form of GELU, --no-bias-gelu-fusion" if model.erf_gelu else "tanh form of GELU"
        yield f"activation {content.get('activation_function')} is the {form}"
    if model.norm_epsilon != ModelConfig.norm_epsilon:
        yield f"norm epsilon is {model.norm_epsilon:g}; our default is {ModelConfig.norm_epsilon:g}"
    if model.position_embedding_type == "rope":
        scaled = (
            f", scaled by {model.rope_scaling_factor:g} as in Llama 3.1"
            if model.use_rope_scaling
            else ""
        )
        pairs = (
            "neighbours of its rotated channels"
            if model.multi_latent_attention
            else "the halves of a head"
        )
        yield f"rope base is {model.rotary_base:g}{scaled}; {pairs} are rotated, no rows are permuted"
    if content.get("num_nextn_predict_layers") and not model.depths:
        yield "config.json speaks of layers of multi-token prediction, and there are none"
    if model.depths and model.layers != PUBLISHED:
        yield (
            f"transformers leaves model.layers.{model.layers} and on out, and calls it UNEXPECTED: it knows depths of "
            f"multi-token prediction behind {PUBLISHED} layers alone"
        )
    if model.has_experts and model.capacity_factor is not None:
        yield f"experts take every token there; --moe-expert-capacity-factor {model.capacity_factor:g} drops some here"
    if model.heads * model.head_dim != model.hidden and not model.multi_latent_attention:
        yield f"heads of {model.head_dim} (--kv-channels) do not add up to the hidden size {model.hidden}"
    if model.tied:
        yield f"the head is tied to the embedding; their files have no {HEAD}"
    rows = model.padded_vocab_size or vocab_size
    if rows != vocab_size:
        yield (
            f"{vocab_size} ids are {rows} rows here; padding is the mean row, which adds at most "
            f"{math.log(rows / vocab_size):.1g} to a loss"
        )


def compare_logits(
    theirs: Path, ours: Path, model: ModelConfig, vocab_size: int, dtype: torch.dtype | None = None
) -> tuple[float, float] | None:
    """Both models on the same random tokens in float32, both whole in memory.

    Args:
        dtype: of the weights that were written. Both models' are rounded to it, so that rounding is no difference.
    Returns: (largest difference of a logit, largest logit); None without the transformers library.
    Raises: CheckpointError for a folder that transformers cannot load.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(0, vocab_size, (1, min(64, model.max_position_embeddings or 64)))
    try:
        reference: Any = AutoModelForCausalLM.from_pretrained(theirs, trust_remote_code=False)
    except Exception as error:  # its classes of errors have nothing in common
        raise CheckpointError(f"{theirs}: transformers cannot load it: {error}") from None
    module: GPTModel = whole_model(replace(model, **_ALL_TOKENS))
    load_full([module], SavedTensors(ours).read, Axis())
    with torch.no_grad():
        want = _rounded(reference, dtype)(tokens).logits
        got = _rounded(module, dtype)(tokens)[..., :vocab_size]
    return (got - want).abs().max().item(), want.abs().max().item()


@torch.no_grad()
def _rounded(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model in float32, its weights rounded to a type. Buffers stay: an expert's bias is float32 in every file."""
    model = model.float().eval()
    for weight in model.parameters() if dtype is not None else ():
        weight.copy_(weight.to(dtype))
    return model


def _equal(saved: SavedTensors, first: str, second: str) -> bool:
    return torch.equal(saved.read(first), saved.read(second))


def _listing(what: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return [f"{what} {', '.join(names[:5])}{more}"] if names else []
