"""The text model of a folder that holds more: a model that sees pictures, and depths of prediction.

A note names each part that is left out. An export has the text model alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

_TEXT = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "llama4": "llama4_text",
    "gemma4": "gemma4_text",
}
"""model_type of a model that sees pictures -> its text model's."""
_INSIDE = ("model.language_model.", "language_model.model.", "language_model.lm_head.")
"""Beginnings of names in the text model of such a model."""
_PICTURES = """
    model.visual. vision_model. multi_modal_projector. model.vision_tower. model.embed_vision.
"""
_LEFT_OUT = {
    **dict.fromkeys(_PICTURES.split(), "the model of pictures"),
    **dict.fromkeys(("model.audio_tower.", "model.embed_audio."), "the model of sounds"),
    # Multi-token prediction of these families has names of its own, and transformers leaves it out.
    **dict.fromkeys(("mtp.", "model.mtp_"), "multi-token prediction"),
}
_WITH_MORE = (*_TEXT.values(), "qwen3_next", "exaone_moe", "ernie4_5_moe")
"""Families whose folders may hold tensors of `_LEFT_OUT`."""


def text_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a folder's text model.

    It is the part text_config of the folder's config.json, or all of it if there is only text.

    Args:
        content: the config.json of a folder.
    """
    inner = content.get("text_config")
    name = content.get("model_type")
    if name not in _TEXT or not isinstance(inner, Mapping):
        return dict(content)
    found = {**inner, "model_type": _TEXT[name]}
    # The whole model's word counts, as in transformers.
    tied = content.get("tie_word_embeddings")
    return found if tied is None else found | {"tie_word_embeddings": tied}


def name_in(family: str, name: str) -> str | None:
    """Return the name that a tensor would have in a folder with the text model alone.

    Returns None for tensors of other parts, such as a model of pictures.

    Args:
        family: the text model's model_type.
        name: the tensor's name in a folder of the whole model, which may read images too.
    """
    if family not in _WITH_MORE:
        return name
    if name.startswith(tuple(_LEFT_OUT)):
        return None
    if not name.startswith(_INSIDE):
        return name
    # The rest is the text model's own name: model.layers.0..., or lm_head.weight.
    return name.replace("language_model.", "", 1)


def left_out(family: str, names: Collection[str]) -> Iterator[str]:
    """Yield a note for each part of a folder that is not converted.

    Args:
        family: the text model's model_type.
        names: the names of all tensors in the folder.
    """
    if family not in _WITH_MORE:
        return
    for start, what in _LEFT_OUT.items():
        count = sum(name.startswith(start) for name in names)
        if count:
            yield f"{what} is left out: {count} tensors ({start}*)"
