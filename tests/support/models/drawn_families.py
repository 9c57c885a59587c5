"""Small configurations of the transformers library for families whose table begins from another's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from random_models import rotary, transformers


def made(name: str, draw: random.Random, **more: Any) -> Any:
    """The class of this model_type with a drawn size; more: further keys, None leaves one to the class."""
    return transformers.AutoConfig.for_model(name, **rotary(draw) | more)


DRAWN: dict[str, Callable[[random.Random], Any]] = {}
