"""Flags of Megatron-LM that have another default here, other choices, or several values.

It is the only such list. `megapipe.flags.table` shows it, and a test derives it from
Megatron-LM's own parser.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Difference(NamedTuple):
    """A flag that has another meaning or default in megapipe than in Megatron-LM.

    Attributes:
        what: the property that differs.
        there: the flag's value in Megatron-LM.
        why: the reason for the difference, or its effect.
    """

    flag: str
    what: Literal["default", "choices", "values"]
    there: str
    why: str


# Megatron-LM's parser has None, and its validation computes the value. Fields here have the value.
_LATER = "its validation fills in the same"
_YARN = "its embedding takes the same"

DIFFERENCES = (
    Difference("--dataloader-type", "default", "None", _LATER),
    Difference(
        "--distributed-backend", "choices", "nccl, gloo", "auto: nccl with a GPU, gloo without"
    ),
    Difference("--distributed-backend", "default", "nccl", "runs on a laptop"),
    Difference(
        "--main-params-dtype",
        "choices",
        "fp32, fp16",
        "bf16 keeps no main parameters in addition to the model's",
    ),
    Difference("--moe-aux-loss-coeff", "default", "0.0", "one for each loss, here and there"),
    Difference("--moe-layer-freq", "default", "1", "a text here, which may be a list"),
    Difference(
        "--moe-router-load-balancing-type",
        "default",
        "aux_loss",
        "several at once, here and there",
    ),
    Difference(
        "--optimizer",
        "choices",
        "adam, sgd, muon, dist_muon, lion, soap, adaptive_muon",
        "FILE.py:NAME too",
    ),
    Difference("--recompute-modules", "default", "None", _LATER),
    Difference("--rotary-seq-len-interpolation-factor", "default", "None", "no interpolation"),
    Difference(
        "--position-embedding-type",
        "choices",
        "learned_absolute, rope, yarn, mrope, relative, none",
        "longrope too, as in Phi-3",
    ),
    Difference("--tiktoken-pattern", "default", "None", "its tokenizer takes the same"),
    Difference(
        "--transformer-impl",
        "choices",
        "local, transformer_engine, inference_optimized",
        "auto: Transformer Engine's layers where it is installed and works",
    ),
    Difference(
        "--transformer-impl",
        "default",
        "transformer_engine",
        "its kernels have not run under megapipe yet, see transformer_engine.md",
    ),
    Difference("--yarn-beta-fast", "default", "None", _YARN),
    Difference("--yarn-beta-slow", "default", "None", _YARN),
    Difference("--yarn-original-max-position-embeddings", "default", "None", _YARN),
)
