"""All choices that change what a run computes or sends, each with its values as launch flags.

A case takes one value of each choice. The first value is what a run has without the flag. What goes
with what is not said here: the checks of a launch decide.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megapipe.checks.run import validate
from megapipe.config import Config
from megapipe.config.layers import inline
from megapipe.errors import UserError
from megapipe.flags.parse import parse
from megapipe.plan import make_plan
from megapipe.schedule import entry_of
from megapipe.training.check import as_here

Case = Mapping[str, str]
"""The value of each choice."""

SEQ = 16
VOCAB = 32
LR = 3e-3
BIAS_STEP = 0.02
"""How far a step moves the bias of a router."""
STEPS = 5
FEW = 4
"""Processes of a case, if what it is to combine does not need more."""
MOST = 8
"""Processes of a case at most."""
HALF = 2
"""Iterations of a run that is saved and goes on."""

_OWN = Path(__file__).parents[3] / "examples" / "own_schedule.py"
_LLAMA = (
    "--normalization RMSNorm --swiglu --ffn-hidden-size 32 --disable-bias-linear "
    "--position-embedding-type"
)
_EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 32"

MODEL: dict[str, dict[str, str]] = {
    "style": {
        "gpt2": "--kv-channels 16",
        "llama": f"{_LLAMA} rope --kv-channels 16 --group-query-attention --num-query-groups 2",
        "latent": (
            f"{_LLAMA} none --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 "
            "--qk-head-dim 8 "
            "--qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm --rotary-scaling-factor 4 "
            "--mscale-all-dim 1"
        ),
    },
    "tied": {"tied": "", "untied": "--untie-embeddings-and-output-weights"},
    "layers": {
        "alike": "",
        "overrides": "--per-layer-overrides "
        """'{"1": {"ffn_hidden_size": 64}, "2": {"window_size": "2,0"}}'""",
    },
    "window": {"none": "", "2": "--window-size 2,0"},
    "documents": {
        "whole": "",
        "attention": "--reset-attention-mask --eod-mask-loss",
        "both": "--reset-attention-mask --reset-position-ids",
    },
    "router": {
        "dense": "",
        "softmax": f"{_EXPERTS} --moe-z-loss-coeff 0.1",
        "sigmoid": (
            f"{_EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
            f"--moe-router-bias-update-rate {BIAS_STEP} --moe-router-num-groups 2 "
            "--moe-router-group-topk 1"
        ),
        "shared": f"{_EXPERTS} --moe-shared-expert-intermediate-size 32 "
        "--moe-shared-expert-gate --moe-layer-freq 2",
        "jitter": f"{_EXPERTS} --moe-router-pre-softmax --moe-input-jitter-eps 0.1",
        # So large a capacity drops nothing: what is dropped is decided by each rank for its own
        # tokens.
        "capacity": f"{_EXPERTS} --moe-expert-capacity-factor 4 --moe-pad-expert-input-to-capacity",
    },
    "balance": {
        "none": "",
        "aux": "--moe-aux-loss-coeff 0.1",
        "seq": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
        "sinkhorn": "--moe-router-load-balancing-type sinkhorn",
    },
    "depths": {
        "0": "",
        "1": "--mtp-num-layers 1",
        "2": "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5",
    },
    "dropout": {
        "hidden": "--hidden-dropout 0.1 --attention-dropout 0",
        "both": "--hidden-dropout 0.1 --attention-dropout 0.2",
        "none": "--hidden-dropout 0 --attention-dropout 0",
    },
    "precision": {
        "float64": "",
        "float32": "",
        "bf16": "--bf16",
        # Far below what overflows: which step does first is a matter of rounding. What is spoiled
        # overflows anyway. It grows after the third step: the second ends at once where something
        # is saved or evaluated.
        "fp16": f"--fp16 --initial-loss-scale {2**6} --loss-scale-window 3 --hysteresis 1",
        "fp8": "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 2",
        "fp8-tensor": "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise",
    },
    "optimizer": {
        "adam": "",
        "sgd": "--optimizer sgd",
        "muon": "--optimizer muon",
        "decoupled": "--decoupled-lr 3e-3 --weight-decay 0.1 --weight-decay-incr-style linear "
        "--start-weight-decay 0.01 --end-weight-decay 0.2",
    },
    "clip": {"1": "", "none": "--clip-grad 0", "0.1": "--clip-grad 0.1"},
    "loss": {"mean": "", "per-token": "--calculate-per-token-loss"},
    "batch": {
        "8": "--micro-batch-size 1 --global-batch-size 8",
        "of-2": "--micro-batch-size 2 --global-batch-size 16",
        "grows": "--micro-batch-size 1 --global-batch-size 16 --rampup-batch-size 8 8 16",
    },
    "evaluation": {"none": "--eval-iters 0", "every-2": "--eval-interval 2 --eval-iters 1"},
    "spoiled": {"no": "", "large": "", "infinite": ""},
    "moments": {
        "fp32": "",
        "bf16": "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    },
}
"""Choices that the numbers depend on: the run of one process has the same values."""

RUN: dict[str, dict[str, str]] = {
    "pp": {
        "1": "",
        "2": "--pipeline-model-parallel-size 2",
        "4": "--pipeline-model-parallel-size 4",
    },
    "schedule": {
        "1f1b": "--pipeline-schedule 1f1b",
        "gpipe": "--pipeline-schedule gpipe",
        "interleaved": "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
        "breadth-first": "--pipeline-schedule breadth-first "
        "--num-virtual-stages-per-pipeline-rank 2",
        "zb-h1": "--pipeline-schedule zb-h1",
        "zb-h2": "--pipeline-schedule zb-h2",
        "zb-v": "--pipeline-schedule zb-v",
        "v-half": "--pipeline-schedule v-half",
        "zb-auto": "--pipeline-schedule zb-auto",
        "hanayo": "--pipeline-schedule hanayo --num-virtual-stages-per-pipeline-rank 2",
        "chimera": "--pipeline-schedule chimera",
        "dualpipe": "--pipeline-schedule dualpipe",
        "dualpipe-v": "--pipeline-schedule dualpipe-v",
        "own": f"--pipeline-schedule {_OWN}:eager",
        "own-split": f"--pipeline-schedule {_OWN}:split --num-virtual-stages-per-pipeline-rank 2",
    },
    "tp": {"1": "", "2": "--tensor-model-parallel-size 2"},
    "sequence": {"whole": "", "split": "--sequence-parallel"},
    "overlap-tp": {"no": "", "yes": "--tp-comm-overlap"},
    "cp": {
        "1": "",
        "p2p": "--context-parallel-size 2 --cp-comm-type p2p",
        "all-gather": "--context-parallel-size 2 --cp-comm-type all_gather",
        "a2a": "--context-parallel-size 2 --cp-comm-type a2a",
    },
    "dp": {"1": "", "2": ""},
    "experts": {
        "like-mlp": "",
        "ep": "--expert-model-parallel-size 2",
        "ep-etp": "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        "etp": "--expert-tensor-parallel-size 1",
    },
    "dispatcher": {"allgather": "", "alltoall": "--moe-token-dispatcher-type alltoall"},
    "slices": {
        "1": "",
        "2": "--pipeline-slices 2",
        "documents": "--pipeline-slices 2 --pipeline-slice-cuts documents",
    },
    "pairs": {"apart": "", "together": "--overlap-moe-expert-parallel-comm"},
    "vocabulary": {"ends": "", "shared": "--vocab-parallel-pipeline"},
    "copies": {
        "none": "",
        "all": "--fine-grained-activation-offloading --offload-time 0.01",
        "some": "--fine-grained-activation-offloading --offload-time 0.01 "
        "--activation-offload-fraction 0.5",
        "modules": "--fine-grained-activation-offloading --offload-time 0.01 "
        "--offload-modules core_attn qkv_linear",
    },
    "sharding": {
        "none": "",
        "optimizer": "--use-distributed-optimizer",
        "gradients": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
        "weights": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
    },
    "overlap": {
        "none": "",
        "reduce": "--overlap-grad-reduce",
        "buckets": "--overlap-grad-reduce --ddp-num-buckets 2",
        "gather": "--overlap-grad-reduce --overlap-param-gather",
    },
    "update": {
        "barrier": "",
        "validated": "--enable-optimizer-post-validation --post-validation-after 0",
        "after-1": "--enable-optimizer-post-validation --post-validation-after 1",
    },
    "messages": {
        "plain": "",
        "batched": "--no-overlap-p2p-communication",
        "ring": "--use-ring-exchange-p2p",
    },
    "recompute": {
        "none": "",
        "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "modules": "--recompute-granularity selective --recompute-modules mlp layernorm moe",
        "partial": "--recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 "
        "--num-microbatches-with-partial-activation-checkpoints 1",
    },
    "fusion": {"no": "", "loss": "--cross-entropy-loss-fusion"},
    "tokens": {"int64": "", "int32": ""},
    "provider": {"ours": "", "megatron": ""},
    "grid": {"tp-cp-dp-pp": "", "tp-pp-dp": "--use-tp-pp-dp-mapping"},
    "told": {
        "little": "",
        "norms": "--log-params-norm --log-num-zeros-in-grad --timing-log-level 2",
    },
    "resumed": {"no": "", "same": "", "from-one": "", "into-one": "", "behind": "--async-save"},
    "again": {"no": "", "2": "--reschedule-after 2"},
    "fp8-gather": {"no": "", "yes": "--fp8-param-gather"},
}
"""Choices that no number may depend on."""

CHOICES = MODEL | RUN
PLAIN: dict[str, str] = {name: next(iter(values)) for name, values in CHOICES.items()}

_TINY = (
    f"--hidden-size 32 --num-attention-heads 4 --max-position-embeddings {SEQ} --seq-length {SEQ} "
    "--mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --padded-vocab-size {VOCAB} "
    f"--train-iters {STEPS} "
    f"--lr {LR} --lr-warmup-iters 2 --lr-decay-style cosine --min-lr 1e-3 --num-workers 0 "
    "--log-interval 1 "
    "--no-check-for-nan-in-loss-and-grad --max-bad-iterations-in-a-row 9 --distributed-backend gloo"
)


FLAGS = {
    name: set(re.findall(r"--[\w-]+", " ".join(values.values())))
    for name, values in CHOICES.items()
}
DATA_PARALLEL = re.compile(r"data[- ]parallel|processes")


def world_size(case: Case) -> int:
    """Return the number of processes of a case."""
    context = 1 if case["cp"] == "1" else 2
    return int(case["tp"]) * context * int(case["dp"]) * int(case["pp"])


def one_process(case: Case) -> dict[str, str]:
    """Return the case whose numbers `case` must have: the same model on one process."""
    return PLAIN | {name: case[name] for name in MODEL}


def num_layers(case: Case) -> int:
    """Return how many layers a case trains: each stage of its pipeline has at least one."""
    _, schedule, *_ = shlex.split(CHOICES["schedule"][case["schedule"]])
    chunks = 1 if entry_of(schedule).chunks == 1 else 2
    return max(4, int(case["pp"]) * chunks)


def flags(case: Case, layers: int) -> list[str]:
    """Return the command line of a case for a model of a number of layers."""
    chosen = [CHOICES[name][value] for name, value in case.items()]
    return shlex.split(" ".join([_TINY, f"--num-layers {layers}", *chosen]))


def config_of(case: Case, layers: int, more: Sequence[str] = ()) -> Config:
    """Return the configuration of a case as each of its processes has it.

    Raises: UserError where a launch would refuse it.
    """
    config = parse(Config, [*flags(case, layers), *more])
    return replace(config, world_size=world_size(case))


def problems(case: Case, most: int = MOST) -> tuple[str, ...]:
    """Return what the checks of a launch say against a case; nothing for one that may run.

    Args:
        most: processes that it may have.
    """
    if (size := world_size(case)) > most:
        return (
            f"{size} processes are more than the {most} of a case: --tensor-model-parallel-size, "
            "--context-parallel-size, --pipeline-model-parallel-size and data-parallel ranks",
        )
    if case["provider"] == "megatron" and case["depths"] != "0":
        return (
            "--mtp-num-layers: a provider in Megatron-LM's signature is refused when it is called "
            "for a depth",
        )
    try:
        config = as_here(config_of(case, num_layers(case)))
        validate(config, has_cuda=False)
        make_plan(replace(config, model=replace(inline(config.model), padded_vocab_size=VOCAB)))
    except UserError as error:
        return error.problems
    return ()


def choices_named(text: str) -> set[str]:
    """Return the choices with a value whose flag a sentence names."""
    words = set(re.findall(r"--[\w-]+", text))
    return {name for name, flags in FLAGS.items() if flags & words} | (
        {"dp"} if DATA_PARALLEL.search(text) else set()
    )
