"""Rules for a flag that sets nothing: it is accepted (flags.noop_flags), or refused.

A Megatron-LM script should run after its launch line is changed, and an accepted name must keep its
promise. So a flag is refused if it would change numbers or asks for a missing feature. The error
says what to do. `python -m megapipe.flags.table` prints these tables.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from megapipe.flags.fork import SWITCHES
from megapipe.flags.megatron_flags import MEGATRON_FLAGS
from megapipe.flags.noop_flags import MANY, NOOP_FLAGS, OLD_FLAGS, rows_of

# The first pattern that fits a name gives its reason. Other names are refused without a reason.
_REASONS = tuple(
    rows_of("""
model-parallel-size: an old name; use --tensor-model-parallel-size
batch-size: an old name; use --micro-batch-size
warmup: an old name; use --lr-warmup-fraction
persistent-save-interval: use --save-interval
encoder-num-layers decoder-num-layers: use --num-layers
encoder-seq-length: use --seq-length
override-ckpt-iteration: use --ckpt-step
fp16-lm-cross-entropy: the loss is always computed in float32
checkpoint-activations: an old name; use --recompute-granularity full
spec: use --model-provider; see docs/model_provider.md
use-mp-args-from-checkpoint-args: any layout loads any checkpoint; give the layout's flags
tokenizer-* tiktoken-* *-use-tokenizer-model-from-checkpoint-args: a tokenizer's files decide
    everything about it
apply-residual-connection-post-layernorm: Megatron-LM's own core models do not read it
use-mup mup-*: --mup-embedding-mult, --mup-output-mult and --softmax-scale act alone; rates and
    initial weights by width do not follow from --mup-base-hidden-size
full-validation multiple-validation-sets validation-set-names: --eval-iters says how much of one
    validation set is read
rope-* rotary-* yarn-* no-yarn-* mrope-section mscale*: rotary positions are plain,
    interpolated, or scaled by --use-rope-scaling or yarn
fp32-residual-connection: the residual stream has the type of the weights
record-shapes pytorch-profiler-*: use --profile --use-pytorch-profiler
moe-router-force-biased: use --moe-router-force-load-balancing
moe-router-quantile-balancing-ema: use --moe-router-enable-expert-bias
moe-paged-* moe-expert-rank-capacity-factor moe-pad-experts-for-cuda-graph-inference: use
    --moe-expert-capacity-factor
moe-routing-trace-*: use --moe-per-layer-logging with --metrics-file
moe-latent-size: experts take the hidden states themselves
moe-* expert-* gtp-* use-grouped-gemm-*: experts have one layout of their weights on a rank
rl-* no-rl-* grpo-* perform-rl-step langrl-* refit-method: megapipe pretrains; no reinforcement
    learning
inference-* no-inference-* *-chunked-prefill flash-decode mlp-chunks-* num-speculative-tokens:
    megapipe trains; it does not serve
bert-* ict-* biencoder-* retriever-* block-data-path titles-data-path indexer-* query-in-block-prob
    evidence-data-path embedding-path use-one-sent-docs mask-* short-seq-prob output-bert-embeddings
    dino-* vision-* swin-* img-* patch-dim num-channels num-classes classes-fraction head-lr-mult:
    megapipe trains GPT models only
mamba-* hybrid-*-pattern is-hybrid-model gdp-* disable-mamba-*: all layers have attention
    or a gated delta net, and an MLP
cache-mla-* mla-*: latents are not cached, and projections down are two products
dsa-* no-dsa-* disable-dsa-*: attention is causal, of all tokens or with --window-size
mtp-standalone: use m in --pipeline-model-parallel-layout
mtp-*: each depth of multi-token prediction has a layer of its own, and its loss trains the model
    below
fine-grained-offloading-*: the table has the copies to the host, one after the other
no-use-layer-wise-param-layout: parameters have one layout
fp8-output-proj: the output head has the type of the weights
fp8-quantizer-factory: --fp8-recipe decides the scales
fp4-*: precision is float32, bf16, fp16 or, by --fp8-format, FP8
lion-*: the optimizers are adam, sgd, muon and --optimizer FILE.py:NAME
*optimizer-*offload* qk-clip*: optimizer state is on the device
hybrid-context-parallel: context-parallel ranks exchange keys in one way, --cp-comm-type
iter-per-epoch data-per-class-fraction decoder-seq-length: megapipe trains GPT models only
fim-*: there is no fill-in-the-middle
inprocess-* calc-ft-* enable-ft-* ft-* fault-* adlr-*: restart with --load
""")
)

_FORK = "sail-sg/zero-bubble-pipeline-parallelism"
_FORK_FLAGS = {
    "--zero-bubble-adaptive-memory-limit-percentile": (
        "zb-auto searches under the limit of --memory-limit-gib"
    ),
}
OF_PLAN = {
    "--memory-gib": (
        "plans alone have it. A run and its check go by the memory of the GPU, or by capacity of "
        "--rates"
    ),
}
"""Flags of `megapipe plan` that people give to other commands too."""

# A name outside of these is a typo, and the nearest name is proposed.
KNOWN = MEGATRON_FLAGS | set(NOOP_FLAGS) | set(_FORK_FLAGS) | set(SWITCHES) | OLD_FLAGS
"""Every flag of Megatron-LM and of its zero-bubble fork."""


def value_problem(name: str, values: Sequence[str]) -> str | None:
    """Return the error for the values of a flag in NOOP_FLAGS; None if the values are accepted.

    A flag in NOOP_FLAGS is accepted and sets nothing.
    """
    allowed, because = NOOP_FLAGS[name]
    wanted = 1 if allowed else 0
    several = bool(values) and MANY in allowed
    # The number of values is judged first: with a wrong one, the values may be another flag's.
    if len(values) != wanted and not several:
        takes = "one value" if allowed else "no value"
        return f"{name} takes {takes}, got {' '.join(values) or 'none'}"
    wrong = [value for value in values if not {"*", value}.intersection(allowed)]
    if "#" in allowed:
        wrong = [value for value in wrong if not re.fullmatch(r"-?\d+", value)]
        return f"{name} {' '.join(wrong)}: expected an integer" if wrong else None
    if not wrong:
        return None
    return f"{name} {' '.join(wrong)}: only {', '.join(allowed)} is implemented ({because})"


def reason(name: str) -> str:
    """Return why a flag of Megatron-LM is refused, or what to use instead; "" if unknown."""
    bare = name.removeprefix("--")
    for patterns, why in _REASONS:
        # fnmatchcase and not fnmatch, which ignores case on some systems.
        if any(fnmatchcase(bare, pattern) for pattern in patterns.split()):
            return why
    return ""


def refusal(name: str) -> str:
    """Return the error for a flag that is another program's or command's, and not implemented."""
    if name in OF_PLAN:
        return f"unknown flag {name}: {OF_PLAN[name]}"
    if name in _FORK_FLAGS:
        why = _FORK_FLAGS[name]
        return f"{name} is a switch of {_FORK} that megapipe does not implement ({why})"
    why = reason(name)
    refused = f"{name} is a Megatron-LM flag that megapipe does not implement yet"
    return f"{refused} ({why})" if why else refused
