"""Multi-token prediction in a folder, as DeepSeek-V3 has it: layers after the last one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megapipe.config import ModelConfig
from megapipe.convert.huggingface.keys import Fields, Meaning

WORDS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NAMES: Mapping[str, str] = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "final_layernorm": "shared_head.norm",
}
"""Names of a depth's tensors that no layer has."""
_COPIES = {"embed_tokens.weight": WORDS, "shared_head.head.weight": HEAD}
"""Tensors of a depth that are copies of the model's own."""


class Depths(Meaning):
    """A config.json key with the number of modules of multi-token prediction.

    The key is only written. An import counts the modules of multi-token prediction by the folder's
    tensors instead.
    """

    default = 0

    def write(self, key: str, model: ModelConfig) -> Fields:
        return {key: model.depths}


def depths_in(names: Collection[str], layers: int) -> int:
    """Return the number of modules of multi-token prediction that a folder has tensors of.

    Args:
        names: names of the tensors.
        layers: number of the model's layers; these modules are numbered after the layers.
    """
    # Each depth has one such tensor, so there are fewer depths than names.
    numbers = range(len(names) + 1)
    return next(n for n in numbers if f"model.layers.{layers + n}.eh_proj.weight" not in names)


def copies(model: ModelConfig) -> dict[str, str]:
    """Return {name of a copy: name of the original} for the tensors of a Hugging Face folder.

    There, each module of multi-token prediction has copies of embedding and head.
    """
    found: dict[str, str] = {}
    for n in range(model.layers, model.layers + model.depths):
        for copy, original in _COPIES.items():
            found[f"model.layers.{n}.{copy}"] = WORDS if model.tied else original
    return found
