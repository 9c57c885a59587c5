"""Flags of the second class: what they ask for holds already, or is done in our own way with the same numbers.

One row per sentence: the names, each with the values that it may have, and what happens instead. A flag that changes
the numbers of a training is never here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Holds(NamedTuple):
    """The reason why a flag may be given.

    values: those it may have, none for a switch. `*` is any, `#` an integer; MANY at the end: one or more of them.
    """

    values: tuple[str, ...]
    because: str


MANY = "..."

# A switch has its name alone; `=a|b`: one of these values; `=*`: any; `=#`: an integer; `=*|...`: several.
_ROWS = """
# model
use-mcore-models use-legacy-models: there is one model
use-cpu-initialization: initial weights are the same under every tp, pp and schedule
attention-softmax-in-fp32: the softmax of attention is computed in float32
apply-query-key-layer-scaling: the factor cancels out; it guards scores of fp16, which are float32 here
openai-gelu: without effect, as in Megatron-LM: --no-bias-gelu-fusion chooses the form of GELU
no-position-embedding: rotary positions add nothing to the embedding
use-flash-attn: torch takes its flash kernel where it has one; --attention-backend flash insists
flash-attention-version=2|3|4: the kernel is torch's
softmax-type=vanilla: the softmax is the plain one
rotary-seq-len-interpolation-factor=1: positions are not interpolated
no-masked-softmax-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm
    no-gradient-accumulation-fusion no-gradient-reduce-div-fusion: names a fused kernel that we do not have
use-te-activation-func use-transformer-engine-op-fuser fused-residual-rmsnorm use-fused-weighted-squared-relu: asks for
    a fused kernel; ours compute the same unfused
disable-jit-fuser: nothing is compiled without --compile
te-rng-tracker inference-rng-tracker: random streams are our own, by layer and microbatch
cross-entropy-fusion-impl=native: what --cross-entropy-loss-fusion is made of
vocab-extra-ids=0: no ids are added
test-mode: layers do not test themselves while they run
enable-experimental: each feature has its own flag
# precision and optimizer
fp8-interval=#: without effect, as in Megatron-LM: scales of delayed scaling follow after each step
reuse-grad-buf-for-mxfp8-param-ag: weights of mxfp8 are gathered in their own type, into their own buffers
moe-router-padding-for-fp8 moe-router-padding-for-quantization: rows of an expert are filled up within its product
accumulate-allreduce-grads-in-fp32: gradients are added in float32, and reduced so without --grad-reduce-in-bf16
num-distributed-optimizer-instances=#: optimizer state is split over all data-parallel ranks, which is less
outer-dp-sharding-strategy=no_shard: all data-parallel ranks are one group, which splits what is split
megatron-fsdp-version=1|2 fsdp-double-buffer fsdp-manual-registration fsdp-db-use-persist-buf-on-alloc-fail
    megatron-fsdp-max-pool-double-buffer megatron-fsdp-enable-fine-grained-param-gather
    suggested-communication-unit-size=# torch-fsdp2-no-reshard-after-forward keep-fp8-transpose-cache: a stage is
    gathered whole, and for how many of its passes the table says
megatron-fsdp-main-params-dtype=fp32 megatron-fsdp-main-grads-dtype=fp32|auto: main parameters and gradients are float32
    without --main-params-dtype and --main-grads-dtype
megatron-fsdp-grad-comm-dtype=fp32|auto: gradients are reduced in float32 without --grad-reduce-in-bf16
muon-fp32-matmul-prec=medium|high: Newton-Schulz is computed in bfloat16 on a GPU and in float32 on a CPU
muon-tp-mode=duplicated|distributed: each tensor-parallel rank makes the whole matrix orthogonal
muon-use-syrk: a kernel that we do not have; the same products
muon-scalar-optimizer=adam: all but muon's matrices have adam
# overlap, collectives, memory
overlap-param-gather-with-optimizer-step: weights are gathered in the next step, each stage's before its first forward
DDP-impl=local|torch: gradients are reduced out of flat buffers, stage by stage
use-nccl-ub disable-symmetric-registration high-priority-a2a-comm-stream nccl-communicator-config-path=*
    high-priority-stream-groups=*|... sharp-enabled-group=dp|dp_replica: NCCL has its defaults
no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding: --sequence-parallel sums and splits the
    embedding's output in one collective
train-sync-interval=#: the host waits for the device once a step
init-model-with-meta-device: a layer's weights are made where they stay
no-align-grad-reduce disable-align-grad-reduce no-align-param-gather: each stage is reduced and gathered where the table
    says, at no common moment
ddp-pad-buckets-for-high-nccl-busbw: each rank's part of a bucket is padded to 64 elements
ddp-average-in-collective: gradients are added up and divided in float32
overlap-p2p-communication overlap-p2p-communication-warmup-flush: the schedule's table orders messages and passes; there
    is nothing to set
defer-embedding-wgrad-compute wgrad-deferral-limit=#: zero-bubble schedules defer weight gradients
tp-comm-overlap-rs-dgrad no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs
    no-tp-comm-split-ag no-tp-comm-split-rs disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad
    disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag disable-tp-comm-split-rs
    tp-comm-overlap-cfg=* tp-comm-bootstrap-backend=nccl|mpi|gloo: --tp-comm-overlap overlaps every collective of a
    linear layer with its products, or none
no-async-tensor-model-parallel-allreduce: the sum of an input's gradient is under way during the weight's product
pipeline-model-parallel-comm-backend=nccl: what --distributed-backend says
hierarchical-context-parallel-sizes=#|...: keys travel in one ring; --cp-comm-type a2a+p2p is p2p
disable-gloo-process-groups use-sharp create-all-gather-group: one process group per mesh axis
distribute-saved-activations: --sequence-parallel splits activations over tensor-parallel ranks
empty-unused-memory-level=0|1|2: torch's allocator keeps freed memory for the next step
cuda-graph-scope=*|... cuda-graph-modules=*|...: --cuda-graph-impl captures a stage's forward and backward whole
optimizer-cuda-graph: the update is launched kernel by kernel
local-rank=#: the launcher passes the rank in the environment
moe-flex-dispatcher-backend=deepep|hybridep|ncclep moe-enable-deepep
    moe-deepep-num-sms=# moe-hybridep-num-sms=# moe-flex-dispatcher-num-sms=# moe-shared-expert-overlap
    ep-overlap-early-attn-memory-release moe-hybridep-num-sms-preprocessing=#
    overlap-dispatch-backward-with-experts-wgrad: one all-to-all, of torch.distributed;
    --overlap-moe-expert-parallel-comm is what works behind it
moe-grouped-gemm moe-permute-fusion moe-router-fusion moe-permute-fusion-into-hybridep: names a fused kernel; experts
    are one grouped product in bf16 on a GPU
moe-enable-routing-replay: the experts of a token are kept for recomputation
# data
no-create-attention-mask-in-dataloader: the loader makes no mask; attention is causal
no-mmap-bin-files dataloader-fast-cache-load dataloader-defer-npy-index-mmap: indices are mapped, tokens read ahead by
    --num-workers threads
per-dataset-sequences-path=*: the headers of the files say it
allow-ambiguous-pad-tokens: nothing is padded, and no id loses its loss for being a pad
num-dataset-builder-threads=#: indices are built in one thread, and kept in --data-cache-path
exit-signal-handler-for-dataloader: readers are threads and stop with their process
disable-msc: files are read from the file system
trust-remote-code: no code of a tokenizer's folder is run
no-use-tokenizer-model-from-checkpoint-args disable-use-tokenizer-model-from-checkpoint-args: the tokenizer is that of
    the flags
# checkpoints
use-dist-ckpt dist-ckpt-format=torch_dist: checkpoints are always distributed
ckpt-format=torch_dist|torch|torch_dcp|fsdp_dtensor: checkpoints are safetensors and JSON; megapipe convert writes
    Megatron-LM's
auto-detect-ckpt-format: a checkpoint's format is read off its folder
async-ckpt-use-cpu-shm use-persistent-ckpt-worker async-strategy=nvrx|mcore async-ckpt-cpu-priority=#
    async-ckpt-io-priority=# dist-ckpt-workers=#: a process beside each rank writes for --async-save, from shared
    memory, as long as the run lives
ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure
    ckpt-fully-parallel-load-per-rank-objects ckpt-pg-tensors-cache-create
    ckpt-fully-parallel-load-exchange-algo=broadcast|gather_rounds|gather_object
    ckpt-fully-parallel-load-process-group=dp|ep_dp ckpt-fully-parallel-save-process-group=dp|ep_dp
    ckpt-pg-tensors-cache-path=*: every rank writes a share of what it holds, and reads what it needs
no-strict-fsdp-dtensor-load disable-strict-fsdp-dtensor-load
    dist-ckpt-strictness=assume_ok_unexpected|log_unexpected|log_all|raise_unexpected|raise_all|return_unexpected|
    return_all|ignore_all: a missing or unexpected tensor always stops the load
dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient no-ckpt-load-validate-sharding-integrity
    disable-ckpt-load-validate-sharding-integrity dist-ckpt-save-pre-mcore-014 ckpt-drop-redundant-extra-state: a
    checkpoint's tensors must be exactly the model's, whatever layout wrote it
verify-integrity: every file's size and SHA-256 are checked before a load
no-save-tokenizer-assets disable-save-tokenizer-assets: no tokenizer file is copied
no-save-rng no-load-rng: there is no random state to keep: streams follow from the seed, the layer and the sample
# logs
no-one-logger: there is no such logger
no-barrier-with-level-1-timing: no timer adds a barrier
log-batch-size-to-tensorboard log-learning-rate-to-tensorboard: always in TensorBoard
no-log-loss-scale-to-tensorboard disable-log-loss-scale-to-tensorboard: it is one more curve there
logging-level=# log-memory-interval=# straggler-ctrlr-port=# straggler-minmax-count=# log-energy
    disable-straggler-on-startup log-device-memory-used log-max-attention-logit record-memory-history
    measure-activation-memory dump-param-to-param-group-map=* memory-snapshot-path=* config-logger-dir=*
    profile-memory-iter=* app-tag-run-name=* app-tag-run-version=* one-logger-project=* one-logger-run-name=*
    one-logger-async otel-enabled otel-service-name=* otel-span-groups=*: not logged
nvtx-ranges: passes are labelled for torch's profiler
flight-recorder-dump-path=* flight-recorder-trace-buffer-size=# flight-recorder-include-stack-trace
    disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
    disable-flight-recorder-include-only-active no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec
    no-flight-recorder-include-only-active: a rank that hangs is named with its pass; NCCL's recorder is left to
    TORCH_NCCL_ in the environment
# sail-sg/zero-bubble-pipeline-parallelism
enable-zb-runtime no-pre-communication-optimization: one executor runs every schedule
zero-bubble-pipeline-timers-start-iter=* zero-bubble-pipeline-timers-end-iter=* schedule-timer-start=*
    schedule-timer-end=*: passes' costs are counted from the model, not timed
offload-continuous-buffers auto-offload-time offload-overlap-sr: acts beside --cpu-offload, whose buffers have few sizes
enable-exactly-numeric-match: every schedule gives the same numbers
num-seq-splits=1: a microbatch is one piece
"""


def rows_of(text: str) -> Iterator[tuple[str, str]]:
    """(names, what is said of them) of each row of a table like the one above."""
    for row in re.sub(r"\n +", " ", text).splitlines():
        names, _, said = row.partition(": ")
        if said:
            yield names, said


HOLDS = {
    f"--{name}": Holds(tuple(values.split("|")) if values else (), because)
    for names, because in rows_of(_ROWS)
    for name, _, values in (word.partition("=") for word in names.replace("| ", "|").split())
}

_OLD = """
use-legacy-models overlap-p2p-communication no-async-tensor-model-parallel-allreduce log-batch-size-to-tensorboard
log-learning-rate-to-tensorboard no-pre-communication-optimization schedule-timer-start schedule-timer-end
measure-activation-memory DDP-impl
"""
OLD_FLAGS = frozenset(f"--{name}" for name in _OLD.split())
"""Names of older versions and of forks, which Megatron-LM's parser no longer has."""
