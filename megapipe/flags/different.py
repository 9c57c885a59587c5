"""Flags of Megatron-LM's names that have another default here, more choices, or another number of values.

The only such list: docs/megatron.md shows it, and a test finds it by Megatron-LM's own parser.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Different(NamedTuple):
    """what: of the flag is not the same; there: in Megatron-LM; why: it is so here."""

    flag: str
    what: Literal["default", "choices", "values"]
    there: str
    why: str


_LATER = "its validation fills in the same"

DIFFERENT = (
    Different("--dataloader-type", "default", "None", _LATER),
    Different("--distributed-backend", "choices", "nccl, gloo", "auto: nccl with a GPU, gloo without"),
    Different("--distributed-backend", "default", "nccl", "runs on a laptop"),
    Different("--main-params-dtype", "choices", "fp32, fp16", "bf16 keeps no main parameters beside the model's"),
    Different("--moe-aux-loss-coeff", "default", "0.0", "one for each loss, here and there"),
    Different("--moe-layer-freq", "default", "1", "a text here, which may be a list"),
    Different("--moe-router-load-balancing-type", "default", "aux_loss", "several at once, here and there"),
    Different("--optimizer", "choices", "adam, sgd, muon, dist_muon, lion, soap, adaptive_muon", "FILE.py:NAME too"),
    Different("--recompute-modules", "default", "None", _LATER),
    Different("--tiktoken-pattern", "default", "None", "its tokenizer takes the same"),
    Different(
        "--transformer-impl",
        "choices",
        "local, transformer_engine, inference_optimized",
        "auto: Transformer Engine's layers where it is installed and works",
    ),
    Different(
        "--transformer-impl",
        "default",
        "transformer_engine",
        "its kernels have not run under megapipe yet, see transformer_engine.md",
    ),
)
