"""Small random models of every family, of transformers, and their losses."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
# The tests draw the same models.
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support" / "models")]
# Before transformers is imported: nothing is asked of the network, and nothing is drawn on stderr.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "critical",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from megapipe.convert.huggingface.tables import FAMILIES  # noqa: E402
from tools.proofs.families.ranks import VOCAB  # noqa: E402

KIMI = "kimi_k2"
"""A DeepSeek-V3 under a name that transformers does not know."""


@cache
def variants() -> Mapping[str, Callable[[random.Random], Any]]:
    """Return model_type -> a function that draws a small configuration of transformers."""
    # Imported late: without transformers this module skips the test that imports it.
    random_models = importlib.import_module("random_models")
    drawn_families = importlib.import_module("drawn_families")
    found = {**random_models.FAMILIES, **drawn_families.DRAWN}
    found[KIMI] = found["deepseek_v3"]
    assert found.keys() == FAMILIES.keys(), found.keys() ^ FAMILIES.keys()
    return found


_DROPOUTS = (
    "attn_pdrop attention_dropout resid_pdrop embd_pdrop hidden_dropout residual_dropout "
    "embedding_dropout"
)


def save(family: str, seed: int, folder: Path) -> Any:
    """Save a drawn model of a family with every number at random, and return it as it is opened.

    It drops nothing in training.
    """
    warnings.simplefilter("ignore")
    transformers = importlib.import_module("transformers")
    config = variants()[family](random.Random(f"{family}{seed}"))
    config.vocab_size = VOCAB
    for name in _DROPOUTS.split():
        if hasattr(config, name):
            setattr(config, name, 0.0)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # Norms of 1 and biases of 0 would hide a wrong place.
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and ("bias" in name or "layer_scalar" in name):
                buffer += 0.1 * torch.randn_like(buffer)
    model.save_pretrained(folder)
    found = opened(folder)
    if family == KIMI:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": KIMI}))
    return found


def opened(folder: Path) -> Any:
    """Return the model of a folder as transformers opens it, in float32."""
    transformers = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    return model.float().eval()


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, v] of a model of transformers."""
    found: Tensor = model(tokens).logits
    return found


MOVES = 8
"""Draws of weights that lie at most an ulp from those of a model."""


@torch.no_grad()
def rounding_of(model: Any, tokens: Tensor) -> Tensor:
    """Return how far the logits of a model of transformers move if its weights move by an ulp.

    The largest of `MOVES` draws counts, in the largest difference of a logit. The model is as it
    was afterwards.
    """
    before = logits_of(model, tokens)
    weights = [param.clone() for param in model.parameters()]
    off = torch.zeros(())
    for seed in range(MOVES):
        dice = torch.Generator().manual_seed(seed)
        for param, weight in zip(model.parameters(), weights, strict=True):
            ways = torch.randint(-1, 2, param.shape, generator=dice)
            param.copy_(torch.nextafter(weight, weight + ways))
        off = torch.maximum(off, (logits_of(model, tokens) - before).abs().max())
    for param, weight in zip(model.parameters(), weights, strict=True):
        param.copy_(weight)
    return off


def loss_of(logits: Tensor, labels: Tensor) -> float:
    """Return the mean cross entropy of logits [b, s, v], summed in float64."""
    return F.cross_entropy(logits.double().flatten(0, 1), labels.flatten()).item()
