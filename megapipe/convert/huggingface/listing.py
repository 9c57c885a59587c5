"""Which families of Hugging Face models can be converted, and why known others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megapipe.config.typed import shown
from megapipe.convert.huggingface.family import IGNORED
from megapipe.convert.huggingface.tables import FAMILIES

# (model_types, the nearest family, what the model here lacks). Read in transformers 5.23; an entry
# goes when its feature comes. A family that is in no list is answered by its keys.
_REFUSED = [
    ("gemma3", "gemma3_text", "a model that sees pictures, around the text model"),
    ("gemma3n", "gemma3_text", "inputs and keys that layers share"),
    ("olmo", "llama", "LayerNorm without a weight"),
    ("kimi_linear bailing_hybrid minimax", "deepseek_v3", "layers of linear attention"),
    ("minicpm", "granite", "a program of transformers to compare it with"),
    ("minicpm3", "deepseek_v2", "latents whose halves are rotated"),
    ("granitemoehybrid nemotron_h falcon_h1 mamba mamba2", "llama", "layers of Mamba"),
    ("gptj codegen", "phi", "rows of queries, keys and values in their order"),
    ("bloom", "gpt2", "ALiBi positions"),
    ("opt", "gpt2", "ReLU"),
    ("gpt_neo", "gpt2", "scores without a scale"),
    ("afmoe", "qwen3_moe", "a gate on attention with a matrix of its own"),
    ("hunyuan_v1_dense", "qwen3", "norms of heads after their rotation"),
    ("hunyuan_v1_moe", "qwen3_moe", "norms of heads after their rotation"),
    ("mimo_v2_flash", "qwen3_moe", "values of another width"),
    ("mistral3", "ministral3", "a model that sees pictures, around the text model"),
    ("deepseek_v32 glm_moe_dsa", "deepseek_v3", "sparse attention"),
    ("deepseek_v4", "deepseek_v3", "several residual streams, and compressed keys"),
]


def lacking(name: str) -> tuple[str, str] | None:
    """Return (nearest family, features that megapipe lacks) for a model_type that is refused.

    Args:
        name: the model_type.
    Returns: None for a model_type that is not in the list of refused ones.
    """
    for names, nearest, what in _REFUSED:
        if name in names.split():
            return nearest, what
    return None


def nearest_by_keys(content: Mapping[str, Any]) -> str:
    """Return the family whose table has the most similar keys to a config.json.

    Args:
        content: the config.json.
    """
    # Keys say more than names: a fine-tuned model often has a model_type of its own.
    own = content.keys() - IGNORED

    def mismatch(name: str) -> int:
        # Keys that it lacks, and its own that the file does not have.
        return len(own ^ FAMILIES[name].defaults.keys())

    return min(FAMILIES, key=mismatch)


def refusal(content: Mapping[str, Any]) -> str:
    """Return a text: why a config.json's model_type is refused, and the nearest family.

    Args:
        content: the config.json.
    """
    name = content.get("model_type")
    if isinstance(name, str) and (found := lacking(name)):
        nearest, what = found
        return (
            f"model_type {name} cannot be converted: there is nothing here for {what}. "
            f"The nearest family is {nearest}"
        )
    known = ", ".join(FAMILIES)
    return (
        f"model_type {shown(name)} is none of {known}. "
        f"By its keys {nearest_by_keys(content)} is the nearest family"
    )


def listing() -> Iterator[str]:
    """Yield the lines of `megapipe convert --list`."""
    width = max(map(len, FAMILIES)) + 2
    yield "Families of Hugging Face models (model_type of config.json), both ways:"
    for name, family in FAMILIES.items():
        yield f"  {name:{width}}{family.what}"
    yield ""
    yield "Refused, for features that are lacking here (with the nearest family):"
    for names, nearest, what in _REFUSED:
        yield f"  {', '.join(names.split())}: {what} ({nearest})"
