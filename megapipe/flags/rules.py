"""Rules for a flag that is no field of ours: it holds already (flags.holds), or is refused with what to do.

A Megatron script should run after its launch line is changed, and a name that is accepted must be true. So a flag that
would change numbers, or promises what is not here, is refused; `docs/megatron.md` is generated from these tables.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from megapipe.flags.fork import SWITCHES
from megapipe.flags.holds import HOLDS, MANY, OLD_FLAGS, rows_of
from megapipe.flags.known import MEGATRON_FLAGS

# The first pattern that fits gives the reason; a name that none fits is refused without one.
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
tokenizer-* tiktoken-* *-use-tokenizer-model-from-checkpoint-args: a tokenizer is what its files say
rope-* rotary-* yarn-* no-yarn-* mrope-section no-rope-freq mscale*: rotary positions are plain or scaled as in Llama
    3.1 (--use-rope-scaling)
glu-linear-offset activation-func-clamp-value: the MLP has GELU, --squared-relu, --swiglu or --quick-geglu
fp32-residual-connection: the residual stream has the type of the weights
record-shapes pytorch-profiler-*: use --profile --use-pytorch-profiler
moe-apply-probs-on-input: the weight of an expert is applied between its two layers
moe-router-force-biased: use --moe-router-force-load-balancing
moe-router-quantile-balancing-ema: use --moe-router-enable-expert-bias
moe-paged-* moe-expert-rank-capacity-factor moe-pad-experts-for-cuda-graph-inference: use --moe-expert-capacity-factor
moe-routing-trace-*: use --moe-per-layer-logging with --metrics-file
moe-latent-size: experts take the hidden states themselves
moe-* expert-* gtp-* use-grouped-gemm-*: experts have one layout of their weights on a rank
rl-* no-rl-* grpo-* perform-rl-step langrl-* refit-method: megapipe pretrains; no reinforcement learning
inference-* no-inference-* *-chunked-prefill flash-decode mlp-chunks-* num-speculative-tokens: megapipe trains; it
    does not serve
bert-* ict-* biencoder-* retriever-* block-data-path titles-data-path indexer-* query-in-block-prob evidence-data-path
    embedding-path use-one-sent-docs mask-* short-seq-prob output-bert-embeddings dino-* vision-* swin-* img-* patch-dim
    num-channels num-classes classes-fraction head-lr-mult: megapipe trains GPT models only
mamba-* hybrid-*-pattern is-hybrid-model linear-* gdp-* disable-mamba-*: all layers are attention and MLP
cache-mla-* mla-*: latents are not cached, and projections down are two products
dsa-* no-dsa-* disable-dsa-* experimental-attention-variant window-*: attention is causal, whole or --window-size
mtp-standalone: use m in --pipeline-model-parallel-layout
mtp-*: each depth of multi-token prediction has a layer of its own and trains what it stands on
fine-grained-offloading-*: copies to the host stand in the table, one behind the other
no-use-layer-wise-param-layout: parameters have one layout
fp8-output-proj: the output head has the type of the weights
fp8-quantizer-factory: scales are those of --fp8-recipe
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
    "--zero-bubble-adaptive-memory-limit-percentile": "zb-auto searches under the limit of --memory-limit-gib",
}

KNOWN = MEGATRON_FLAGS | set(HOLDS) | set(_FORK_FLAGS) | set(SWITCHES) | OLD_FLAGS


def value_problem(name: str, values: Sequence[str]) -> str | None:
    """A problem with the values of a flag in HOLDS, in one line; None for none."""
    allowed, because = HOLDS[name]
    if len(values) != (1 if allowed else 0) and not (values and MANY in allowed):
        return f"{name} takes {'one value' if allowed else 'no value'}, got {' '.join(values) or 'none'}"
    wrong = [value for value in values if not {"*", value}.intersection(allowed)]
    if "#" in allowed:
        wrong = [value for value in wrong if not re.fullmatch(r"-?\d+", value)]
        return f"{name} {' '.join(wrong)}: expected an integer" if wrong else None
    return f"{name} {' '.join(wrong)}: only {', '.join(allowed)} is implemented ({because})" if wrong else None


def reason(name: str) -> str:
    """The reason why a Megatron-LM flag is refused, or what to use; empty if all there is to say is 'not yet'."""
    bare = name.removeprefix("--")
    return next((why for patterns, why in _REASONS if any(fnmatchcase(bare, p) for p in patterns.split())), "")


def refusal(name: str) -> str:
    """The line that stops the run at a flag in KNOWN that neither acts nor holds already."""
    if name in _FORK_FLAGS:
        return f"{name} is a switch of {_FORK} that megapipe does not implement ({_FORK_FLAGS[name]})"
    why = reason(name)
    return f"{name} is a Megatron-LM flag that megapipe does not implement yet" + (f" ({why})" if why else "")
