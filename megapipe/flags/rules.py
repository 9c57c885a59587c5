"""What becomes of a flag that is no field of ours: accepted because it asks for what we always do, or refused and why.

A Megatron script should run after its launch line is changed, and a name that is accepted must be true. So a flag is
accepted only if leaving it out would change nothing; `docs/megatron.md` is generated from these tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from megapipe.flags.known import MEGATRON_FLAGS
from megapipe.schedule import SCHEDULES


class Accepted(NamedTuple):
    """A flag that changes nothing here. values: those it may have; none for a switch, `*` for any one value."""

    values: tuple[str, ...]
    because: str


_SWITCH: tuple[str, ...] = ()
_ANY = ("*",)
_UNFUSED = "names a fused kernel that we do not have"
_FLOAT32 = "always float32"
_STREAMS = "there is no random state to keep: streams follow from the seed, the layer and the sample"

ACCEPTED: dict[str, Accepted] = {
    "--use-mcore-models": Accepted(_SWITCH, "there is one model; without effect in Megatron-LM too"),
    "--use-dist-ckpt": Accepted(_SWITCH, "checkpoints are always distributed"),
    "--use-cpu-initialization": Accepted(_SWITCH, "initial weights are the same under every tp, pp and schedule"),
    "--accumulate-allreduce-grads-in-fp32": Accepted(
        _SWITCH, "gradients are added in float32, and reduced so without --grad-reduce-in-bf16"
    ),
    "--attention-softmax-in-fp32": Accepted(_SWITCH, "torch's attention kernels compute the softmax in float32"),
    "--apply-query-key-layer-scaling": Accepted(
        _SWITCH, "the factor cancels out; it guards scores of 16 bits, which our kernels do not keep"
    ),
    "--openai-gelu": Accepted(_SWITCH, "GELU always has the tanh form"),
    "--no-masked-softmax-fusion": Accepted(_SWITCH, _UNFUSED),
    "--no-bias-swiglu-fusion": Accepted(_SWITCH, _UNFUSED),
    "--no-bias-dropout-fusion": Accepted(_SWITCH, _UNFUSED),
    "--no-rope-fusion": Accepted(_SWITCH, _UNFUSED),
    "--no-persist-layer-norm": Accepted(_SWITCH, _UNFUSED),
    "--no-gradient-accumulation-fusion": Accepted(_SWITCH, _UNFUSED),
    "--disable-jit-fuser": Accepted(_SWITCH, "nothing is compiled"),
    "--no-save-rng": Accepted(_SWITCH, _STREAMS),
    "--no-load-rng": Accepted(_SWITCH, _STREAMS),
    "--no-create-attention-mask-in-dataloader": Accepted(_SWITCH, "the loader makes no mask; attention is causal"),
    "--no-one-logger": Accepted(_SWITCH, "there is no such logger"),
    "--disable-msc": Accepted(_SWITCH, "files are read from the file system"),
    "--rerun-mode": Accepted(("disabled",), "a step is never run twice to compare its results"),
    "--timing-log-level": Accepted(("0",), "no timers of a finer level"),
    "--context-parallel-size": Accepted(("1",), "there is no context parallelism yet"),
    "--cp-comm-type": Accepted(_ANY, "without effect with one context-parallel rank"),
    "--expert-model-parallel-size": Accepted(("1",), "there are no experts"),
    "--expert-tensor-parallel-size": Accepted(("1",), "there are no experts"),
    "--num-distributed-optimizer-instances": Accepted(("1",), "there is one"),
    "--data-parallel-sharding-strategy": Accepted(("no_shard",), "parameters and gradients are whole on each rank"),
    "--cross-entropy-fusion-impl": Accepted(("native",), "what --cross-entropy-loss-fusion is made of"),
    "--vocab-extra-ids": Accepted(("0",), "no ids are added"),
    "--main-grads-dtype": Accepted(("fp32",), _FLOAT32),
    "--main-params-dtype": Accepted(("fp32",), _FLOAT32),
    "--exp-avg-dtype": Accepted(("fp32",), _FLOAT32),
    "--exp-avg-sq-dtype": Accepted(("fp32",), _FLOAT32),
}

_SPEED = "leave it out: it asks for speed, not for other results"
_GPT = "megapipe trains GPT models only"
_MEMORY = "leave it out: it saves memory and computes the same"

# The first pattern that fits gives the reason; a name that none fits is refused without one.
_REASONS: tuple[tuple[str, str], ...] = (
    ("model-parallel-size", "an old name; use --tensor-model-parallel-size"),
    ("batch-size", "an old name; use --micro-batch-size"),
    ("warmup", "an old name; use --lr-warmup-fraction"),
    ("persistent-save-interval", "use --save-interval"),
    ("encoder-num-layers decoder-num-layers", "use --num-layers"),
    ("encoder-seq-length", "use --seq-length"),
    ("use-rotary-position-embeddings", "use --position-embedding-type rope"),
    ("no-position-embedding", "use --position-embedding-type none"),
    ("use-flash-attn", "use --attention-backend flash"),
    ("override-ckpt-iteration", "use --ckpt-step"),
    ("dist-ckpt-format", "use --ckpt-format torch_dist"),
    ("local-rank", "start with torchrun, which passes the rank in the environment"),
    ("fp16-lm-cross-entropy", "the loss is always computed in float32"),
    ("use-distributed-optimizer", _MEMORY),
    ("checkpoint-activations", "an old name; use --recompute-granularity full"),
    ("distribute-saved-activations", _MEMORY),
    ("overlap-* ddp-* no-align-* disable-align-*", _SPEED),
    ("async-save ckpt-fully-parallel-* no-ckpt-fully-parallel-save ckpt-assume-constant-structure", _SPEED),
    ("manual-gc* no-manual-gc-eval disable-manual-gc-eval empty-unused-memory-level", _SPEED),
    ("tp-comm-* no-tp-comm-* disable-tp-comm-* defer-embedding-wgrad-compute", _SPEED),
    ("no-mmap-bin-files num-dataset-builder-threads dataloader-fast-cache-load", _SPEED),
    ("spec", "use --model-provider; see docs/model_provider.md"),
    ("use-mp-args-from-checkpoint-args", "any layout loads any checkpoint; give the layout's flags"),
    ("rampup-batch-size step-batch-size-schedule", "the batch size is constant"),
    ("microbatch-group-size-per-virtual-pipeline-stage", "the schedule decides how many stages a rank holds"),
    ("train-data-path valid-data-path test-data-path *-data-args-path data-args-path", "use --data-path and --split"),
    ("vocab-file merge-file", "use --tokenizer-type SentencePieceTokenizer --tokenizer-model FILE"),
    ("tokenizer-* tiktoken-* *-use-tokenizer-model-from-checkpoint-args", "tokenizers are SentencePiece and Null"),
    ("wandb-* one-logger-* otel-*", "use --tensorboard-dir"),
    ("no-bias-gelu-fusion", "without fusion Megatron-LM takes the erf form of GELU; megapipe has the tanh form"),
    (
        "rope-* rotary-* yarn-* no-yarn-* mrope-section no-rope-freq mscale*",
        "rotary positions are plain or scaled as in Llama 3.1 (--use-rope-scaling)",
    ),
    (
        "glu-linear-offset activation-func-clamp-value",
        "the MLP has GELU, --squared-relu, --swiglu or --quick-geglu",
    ),
    ("init-method-xavier-uniform", "initial weights are normal; use --init-method-std"),
    ("fp32-residual-connection", "the residual stream has the type of the weights"),
    ("nvtx-ranges record-shapes pytorch-profiler-*", "use --profile --use-pytorch-profiler"),
    ("moe-* num-experts expert-* ep-* gtp-* use-grouped-gemm-*", "there are no mixture-of-experts layers"),
    ("rl-* no-rl-* grpo-* perform-rl-step langrl-* refit-method", "megapipe pretrains; no reinforcement learning"),
    (
        "inference-* no-inference-* *-chunked-prefill flash-decode mlp-chunks-* num-speculative-tokens",
        "megapipe trains; it does not serve",
    ),
    ("bert-* ict-* biencoder-* retriever-* block-data-path titles-data-path indexer-* query-in-block-prob", _GPT),
    ("evidence-data-path embedding-path use-one-sent-docs mask-* short-seq-prob output-bert-embeddings", _GPT),
    ("dino-* vision-* swin-* img-* patch-dim num-channels num-classes classes-fraction head-lr-mult", _GPT),
    ("iter-per-epoch data-per-class-fraction decoder-seq-length", _GPT),
    ("mamba-* hybrid-*-pattern is-hybrid-model linear-* gdp-* disable-mamba-*", "all layers are attention and MLP"),
    (
        "multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-* v-head-dim mla-* cache-mla-*",
        "attention is multi-head or grouped-query",
    ),
    (
        "dsa-* no-dsa-* disable-dsa-* experimental-attention-variant window-*",
        "attention is causal, whole or --window-size",
    ),
    ("mtp-*", "there is no multi-token prediction"),
    (
        "fp8-* fp4-* no-fp8-* disable-fp8-* first-last-layers-bf16 num-layers-at-* keep-fp8-*",
        "precision is float32, bf16 or fp16",
    ),
    ("muon-* lion-* sgd-* use-precision-aware-optimizer *optimizer-*offload* qk-clip*", "the optimizer is AdamW"),
    ("*fsdp*", "parameters are not sharded over data-parallel ranks"),
    ("context-* hierarchical-context-* hybrid-context-parallel", "there is no context parallelism"),
    ("fim-*", "there is no fill-in-the-middle"),
    (
        "inprocess-* calc-ft-* enable-ft-* ft-* flight-recorder-* no-flight-* disable-flight-* fault-* error-* adlr-*",
        "restart with --load",
    ),
)

_SAIL_SG = "sail-sg/zero-bubble-pipeline-parallelism"
_SAIL_SG_FLAGS: dict[str, str] = {
    "--enable-zero-bubble": "zb-h1",
    "--zero-bubble-v-schedule": "zb-v",
    "--zero-bubble-v-schedule-mem-setup": "zb-v, v-half or v-min",
    "--zero-bubble-max-pending-backward": "zb-h1 or zb-h2",
    "--enable-1f1b-v": "",
    "--enable-zb-runtime": "",
    "--enable-optimizer-post-validation": "",
    "--enable-exactly-numeric-match": "",
    "--allow-padding-num-layers": "",
    "--interleave-group-size": "",
    "--num-seq-splits": "",
    "--zero-bubble-adaptive-memory-limit-percentile": "",
    "--zero-bubble-pipeline-timers-start-iter": "",
    "--zero-bubble-pipeline-timers-end-iter": "",
    "--offload-chunk-num": "",
    "--offload-time": "",
    "--auto-offload-time": "",
    "--profile-memory-iter": "",
}

KNOWN = MEGATRON_FLAGS | set(_SAIL_SG_FLAGS)


def accepted_problem(name: str, values: Sequence[str]) -> str | None:
    """What is wrong with the values of a flag in ACCEPTED, in one line, or None."""
    allowed, because = ACCEPTED[name]
    if len(values) != (1 if allowed else 0):
        return f"{name} takes {'one value' if allowed else 'no value'}, got {' '.join(values) or 'none'}"
    if not allowed or allowed == _ANY or values[0] in allowed:
        return None
    return f"{name} {values[0]}: only {', '.join(allowed)} is implemented ({because})"


def reason(name: str) -> str:
    """Why a Megatron-LM flag is refused or what to use instead; empty if all there is to say is 'not yet'."""
    bare = name.removeprefix("--")
    return next((why for patterns, why in _REASONS if any(fnmatchcase(bare, p) for p in patterns.split())), "")


def refusal(name: str) -> str:
    """The line that stops the run at a flag in KNOWN that is neither a field nor accepted."""
    if name in _SAIL_SG_FLAGS:
        return f"{name} is a switch of {_SAIL_SG}{_schedule_remedy(_SAIL_SG_FLAGS[name])}"
    why = reason(name)
    return f"{name} is a Megatron-LM flag that megapipe does not implement yet" + (f" ({why})" if why else "")


def _schedule_remedy(schedules: str) -> str:
    if not schedules:
        return " that megapipe does not implement"
    first = schedules.replace(",", "").split()[0]
    # Never name a schedule that the next command would refuse.
    have = "" if first in SCHEDULES else f", which this version does not have yet (it has {', '.join(SCHEDULES)})"
    return f"; here the schedule has a name: --pipeline-schedule {schedules}{have}"
