"""Small configurations of the transformers library for families whose table begins from another's."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from drawn_dense import DENSE
from drawn_experts import EXPERTS, glm4_moe_lite, sigmoid
from random_models import latent, rotary, transformers

SETTINGS = DENSE | EXPERTS


def made(name: str, draw: random.Random) -> Any:
    """Return a configuration of this model_type: a drawn size and the family's settings.

    The setting `without` names the keys that the family does not have.
    """
    more = SETTINGS[name](draw)
    # The library changes what it is given.
    said = deepcopy(rotary(draw) | {"pad_token_id": 0, "initializer_range": 0.1} | more)
    without = said.pop("without", "").split()
    return transformers.AutoConfig.for_model(name, **{key: said[key] for key in said if key not in without})


def gpt_bigcode(draw: random.Random) -> Any:
    return transformers.GPTBigCodeConfig(
        n_embd=32,
        n_head=draw.choice([2, 4]),
        n_layer=draw.choice([2, 4]),
        n_inner=draw.choice([None, 24]),
        n_positions=24,
        vocab_size=101,
        activation_function=draw.choice(["gelu_pytorch_tanh", "gelu"]),
        tie_word_embeddings=draw.random() < 0.5,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )


def youtu(draw: random.Random) -> Any:
    return transformers.YoutuConfig(
        **{key: value for key, value in latent(draw).items() if key not in sigmoid(draw) and "dense" not in key}
    )


DRAWN: dict[str, Callable[[random.Random], Any]] = {
    **{name: functools.partial(made, name) for name in SETTINGS},
    "gpt_bigcode": gpt_bigcode,
    "glm4_moe_lite": glm4_moe_lite,
    "youtu": youtu,
}
