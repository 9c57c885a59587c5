"""Checks that both sides have the same model.

Names and shapes are compared before a conversion, logits after it. Notes say what has another
meaning on the other side.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.depths import copies
from megapipe.convert.huggingface.mapping import BUFFERS, Tensors
from megapipe.convert.huggingface.tables import FAMILIES
from megapipe.convert.huggingface.towers import text_of
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
"""Settings with which every token reaches the experts that its router chooses."""


def check_theirs(table: Sequence[Tensors], saved: SavedTensors, model: ModelConfig) -> None:
    """Check that every tensor of a Hugging Face folder is used once and has the expected shape.

    Some tensors may be left over: buffers such as masks, and equal copies of a tied embedding. So
    may the copies of embedding and head in modules of multi-token prediction.

    Args:
        table: for every tensor of megapipe, the names of the Hugging Face tensors that it is made
            from. `split` gives their expected shapes.
        saved: the tensors of the Hugging Face folder.
        model: the configuration read from the folder's config.json.
    Raises: CheckpointError with every tensor that is missing, left over or of another shape.
    """
    used = {key for rule in table for key in rule.theirs}
    missing = sorted(used - saved.shapes.keys())
    rest = {key for key in saved.shapes.keys() - used if not BUFFERS.fullmatch(key)}
    rest -= copies(model).keys()
    embedding = next(rule.theirs[0] for rule in table if rule.ours == WORD_EMBEDDINGS)
    # Some tied models are saved with their head all the same.
    for head in rest & _HEADS:
        if model.tied and embedding in saved.shapes and _equal(saved, head, embedding):
            rest.remove(head)
    asked = f"{saved.folder}: config.json asks for tensors that are missing:"
    unknown = f"{saved.folder}: tensors that config.json knows nothing of:"
    problems = _listing(asked, missing) + _listing(unknown, sorted(rest))
    shapes = our_shapes(model)
    for rule in table:
        # Joining is no test: views ask for the number of elements alone.
        parts = rule.split(torch.empty(shapes[rule.ours], device="meta"))
        for key, part in zip(rule.theirs, parts, strict=True):
            there = saved.shapes.get(key, part.shape)
            if there != tuple(part.shape):
                means = list(part.shape)
                problems.append(f"{key} is {list(there)}, but config.json means {means}")
    if problems:
        raise CheckpointError(problems)


_HEADS = {f"{table.names['output_layer'].names[0]}.weight" for table in FAMILIES.values()}
"""Names of an output head."""


def check_ours(saved: SavedTensors, model: ModelConfig, name: str) -> None:
    """Check that a checkpoint of megapipe has all tensors of its model, and no other.

    Tensors of the optimizer are not checked.

    Args:
        saved: the tensors of the checkpoint.
        name: the name of the checkpoint, for the error.
    Raises: CheckpointError with every tensor that is missing, left over or of another shape.
    """
    of_model = {
        key: shape for key, shape in saved.shapes.items() if not key.startswith("optimizer.")
    }
    check_names(name, our_shapes(model), of_model)


def check_names(
    name: str,
    needed: Mapping[str, Shape],
    there: Mapping[str, Shape],
    forms: Callable[[Shape], Sequence[Shape]] = lambda shape: (shape,),
) -> None:
    """Check names and shapes of tensors.

    Args:
        name: the name of the checkpoint, for the error.
        needed: {name: shape} of each tensor of the model.
        there: {name: shape} of each tensor of the checkpoint.
        forms: takes a needed shape, and returns the shapes that the tensor may have in the
            checkpoint. Default: only the needed shape itself.
    Raises: CheckpointError with every tensor that is missing, left over or of another shape.
    """
    missing = [key for key in needed if key not in there]
    rest = [key for key in there if key not in needed]
    problems = _listing("lacks", missing) + _listing("has what its arguments do not mean,", rest)
    problems += [
        f"{key} is {list(there[key])}, but its arguments mean {list(shape)}"
        for key, shape in needed.items()
        if key in there and there[key] not in forms(shape)
    ]
    if problems:
        raise CheckpointError([f"{name}: {problem}" for problem in problems])


def other_copies(saved: SavedTensors, model: ModelConfig) -> Iterator[str]:
    """Yield a note for each copy of embedding or head that differs from the original.

    In a Hugging Face folder, modules of multi-token prediction have such copies.

    Args:
        saved: the tensors of that folder.
    """
    for copy, its in copies(model).items():
        if copy not in saved.shapes:
            continue
        if saved.shapes[copy] != saved.shapes[its] or not _equal(saved, copy, its):
            yield f"{copy} is left out, though it is not as {its}, which depths share"


def notes(content: Mapping[str, Any], model: ModelConfig, vocab_size: int) -> Iterator[str]:
    """Yield notes for the user on settings that are easily misread or differ in Hugging Face.

    Args:
        content: the config.json.
        model: megapipe's configuration of the same model.
        vocab_size: number of ids without padding.
    """
    if model.activation == "gelu":
        name = content.get("activation_function", content.get("hidden_act"))
        form = "tanh form of GELU"
        if model.erf_gelu:
            form = "erf form of GELU, --no-bias-gelu-fusion"
        yield f"activation {name} is the {form}"
    if model.norm_epsilon != ModelConfig.norm_epsilon:
        default = ModelConfig.norm_epsilon
        yield f"norm epsilon is {model.norm_epsilon:g}; our default is {default:g}"
    if content.get("residual_dropout") and "embedding_dropout" not in content:
        yield (
            f"--hidden-dropout {model.hidden_dropout:g} drops embeddings too, "
            "which residual_dropout does not"
        )
    if model.rotates:
        yield from _rotation_notes(model)
    yield from _depth_notes(content, model)
    if model.has_experts and model.capacity_factor is not None:
        flag = f"--moe-expert-capacity-factor {model.capacity_factor:g}"
        yield f"experts take every token there; {flag} drops some here"
    if model.heads * model.head_dim != model.hidden and not model.multi_latent_attention:
        yield (
            f"heads of {model.head_dim} (--kv-channels) do not add up to "
            f"the hidden size {model.hidden}"
        )
    if model.tied:
        yield "the head is tied to the embedding; their files have no tensor of its own for it"
    rows = model.padded_vocab_size or vocab_size
    if rows != vocab_size:
        yield (
            f"{vocab_size} ids are {rows} rows here; padding is the mean row, which adds at most "
            f"{math.log(rows / vocab_size):.1g} to a loss"
        )


def _rotation_notes(model: ModelConfig) -> Iterator[str]:
    pairs = "the halves of a head"
    if model.multi_latent_attention or model.rotary_interleaved:
        pairs = "neighbours of its rotated channels"
    elif model.rotary_percent != 1:
        pairs = f"the halves of {model.rotary_percent:g} of a head's channels"
    scaled = ""
    if model.use_rope_scaling:
        scaled = f", scaled by {model.rope_scaling_factor:g} as in Llama 3.1"
    yield f"rope base is {model.rotary_base:g}{scaled}; {pairs} are rotated, no rows are permuted"


def _depth_notes(content: Mapping[str, Any], model: ModelConfig) -> Iterator[str]:
    if content.get("num_nextn_predict_layers") and not model.depths:
        yield "config.json speaks of layers of multi-token prediction, and there are none"
    family = FAMILIES.get(content.get("model_type", ""))
    published = family.published if family is not None else ()
    if model.depths and model.layers not in published:
        known = "none in this family"
        if published:
            known = f"them after {' or '.join(map(str, published))} layers alone"
        yield (
            f"transformers leaves model.layers.{model.layers} and on out, and calls it "
            f"UNEXPECTED: of depths of multi-token prediction it knows {known}"
        )


def compare_logits(
    theirs: Path,
    ours: Path,
    model: ModelConfig,
    vocab_size: int,
    dtype: torch.dtype | None = None,
) -> tuple[float, float] | None:
    """Compare a Hugging Face model with megapipe's on the same random tokens in float32.

    Both models are in memory at the same time.

    Args:
        theirs: the Hugging Face folder.
        ours: the folder of megapipe's checkpoint, iter_NNNNNNN.
        model: the configuration of megapipe's model.
        vocab_size: number of ids without padding. megapipe's logits of the padding are left out.
        dtype: type of the weights that were written. The weights of the two models are rounded to
            it, so that rounding is no difference. None to round nothing.
    Returns: (largest difference of a logit, largest logit); None without the transformers library.
    Raises: CheckpointError for a folder that transformers cannot load.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import AutoModelForCausalLM

    length = min(64, model.max_position_embeddings or 64)
    tokens = torch.randint(0, vocab_size, (1, length))
    try:
        config = _config(theirs)
        reference: Any = AutoModelForCausalLM.from_pretrained(
            theirs, config=config, trust_remote_code=False
        )
    except Exception as error:  # its classes of errors have nothing in common
        raise CheckpointError(f"{theirs}: transformers cannot load it: {error}") from None
    module: GPTModel = whole_model(replace(model, **_ALL_TOKENS))
    load_full([module], SavedTensors(ours).read, Axis())
    with torch.no_grad():
        want = _rounded(reference, dtype)(tokens).logits
        got = _rounded(module, dtype)(tokens)[..., :vocab_size]
    return (got - want).abs().max().item(), want.abs().max().item()


def _config(folder: Path) -> Any:
    """Return transformers' configuration of a folder.

    Some families are unknown to transformers. The config.json of such a family is read under the
    model_type of a family with the same computation.
    """
    from transformers import AutoConfig

    read = json.loads((folder / "config.json").read_text())
    content = text_of(read)
    if content != read:
        return AutoConfig.for_model(**content)
    family = FAMILIES.get(str(content.get("model_type")))
    if family is None or not family.computed_as:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return AutoConfig.for_model(**content | {"model_type": family.computed_as})


@torch.no_grad()
def _rounded(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Turn the model to float32, round its weights to `dtype`, and return it.

    With None nothing is rounded.
    """
    model = model.float().eval()
    # Buffers stay: an expert's bias is float32 in every file.
    for weight in model.parameters() if dtype is not None else ():
        weight.copy_(weight.to(dtype))
    return model


def _equal(saved: SavedTensors, first: str, second: str) -> bool:
    return torch.equal(saved.read(first), saved.read(second))


def _listing(what: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return [f"{what} {', '.join(names[:5])}{more}"] if names else []
