"""config.json and ModelConfig: the one made from the other, and what neither can express.

A family can express a model if its config.json, read back, means the same. Nothing is thus dropped
in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megapipe.checkpoint.resume import resume_problems
from megapipe.config import Config, ModelConfig
from megapipe.convert.huggingface.layers import canonical
from megapipe.convert.huggingface.listing import refusal
from megapipe.convert.huggingface.tables import FAMILIES
from megapipe.convert.huggingface.values import unfit
from megapipe.errors import CheckpointError

Json = Mapping[str, Any]


def from_huggingface(content: Json) -> ModelConfig:
    """Return the architecture that a config.json describes; the vocabulary is not padded.

    Args:
        content: the config.json.
    Raises: CheckpointError naming every key whose value megapipe cannot express.
    """
    name = content.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(f"config.json: {refusal(content)}")
    family = FAMILIES[name]
    problems = list(family.unknown(content))
    content = family.filled(content)
    problems += unfit(content)
    if content.get("quantization_config") is not None:
        problems.append(
            "quantization_config is given, and quantised weights cannot be converted. "
            "Dequantise the model, and leave that key out"
        )
    if problems:
        raise CheckpointError([f"config.json: {problem}" for problem in problems])
    try:
        fields = family.read(content, problems)
        content["vocab_size"]
    except KeyError as error:
        raise CheckpointError(f"config.json of a {name} lacks {error}") from None
    if problems:
        raise CheckpointError([f"config.json: {problem}" for problem in problems])
    return ModelConfig(**fields)


def to_huggingface(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return a config.json for this model, of the first family that can express it.

    Args:
        model: megapipe's configuration.
        vocab_size: number of ids without padding.
    Raises: CheckpointError with the differences to the family that comes nearest.
    """
    if unsaid := _unsaid(model):
        raise CheckpointError(unsaid)
    others: list[tuple[bool, list[str], str]] = []
    for name, family in FAMILIES.items():
        if (
            family.is_sparse != model.has_experts
            or family.is_latent != model.multi_latent_attention
        ):
            continue
        content = family.write(model) | {
            "model_type": name,
            "vocab_size": vocab_size,
            "tie_word_embeddings": model.tied,
        }
        differences = differing(model, content, name)
        if not differences:
            return content
        others.append((_is_refused(content), differences, name))
    # A refusal is one text however far the model is, so these families come last.
    _, fewest, nearest = min(others, key=lambda other: (other[0], len(other[1])))
    head = f"no family of Hugging Face models is like this one; nearest is {nearest}:"
    raise CheckpointError([head, *fewest])


def _is_refused(content: Json) -> bool:
    try:
        from_huggingface(content)
    except CheckpointError:
        return True
    return False


def differing(model: ModelConfig, content: Json, name: str) -> list[str]:
    """Return a text for each setting in which a config.json describes another model than `model`.

    For a config.json that cannot be converted, the texts are the reasons.

    Args:
        model: megapipe's configuration.
        content: the config.json.
        name: the owner of the config.json, such as a family or a folder, for the texts.
    """
    try:
        there = from_huggingface(content)
    except CheckpointError as error:
        return list(error.problems)
    # The depths are not in config.json: the tensors say them.
    there = dataclasses.replace(there, mtp_num_layers=model.mtp_num_layers)
    saved = dataclasses.asdict(canonical(there))
    here = Config(model=canonical(model))
    return [*_unsaid(model), *resume_problems(saved, None, here, name)]


def _unsaid(model: ModelConfig) -> list[str]:
    """Return texts on settings that change a layer's result and have no key in any config.json."""
    if not (model.has_experts and model.by_sinkhorn):
        return []
    return [
        "--moe-router-load-balancing-type sinkhorn has a rule of its own for the weights of "
        "experts; no config.json of Hugging Face can say so"
    ]
