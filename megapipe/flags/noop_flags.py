"""Megatron-LM's flags that are accepted and set nothing: megapipe does what they ask for anyway.

Or it reaches the same numbers in a way of its own. A row of the table below has flags, the values
that each may have, and a sentence about what happens instead. A flag that would change the numbers
of a training is never among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Noop(NamedTuple):
    """The values that a flag of Megatron-LM may have if it is accepted and sets nothing.

    Attributes:
        values: the accepted values; () for a switch. "*" stands for any value, "#" for an integer.
            ("*", MANY) accepts one or more values of any kind.
        because: the sentence about what happens instead.
    """

    values: tuple[str, ...]
    because: str


MANY = "..."

# A switch is its name alone. NAME=a|b takes one of these values, NAME=* any value, NAME=# an
# integer, and NAME=*|... several values.
_ROWS = """
# model
use-mcore-models use-legacy-models: there is one model
use-cpu-initialization: initial weights are the same under every tp, pp and schedule
attention-softmax-in-fp32: the softmax of attention is computed in float32
apply-query-key-layer-scaling: the factor cancels out; it protects scores in fp16, and scores are
    float32 here
openai-gelu: without effect, as in Megatron-LM: --no-bias-gelu-fusion chooses the form of GELU
no-position-embedding: rotary positions add nothing to the embedding
use-flash-attn: torch takes its flash kernel where it has one; --attention-backend flash requires it
flash-attention-version=2|3|4: the kernel is torch's
no-masked-softmax-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion
    no-persist-layer-norm no-gradient-accumulation-fusion no-gradient-reduce-div-fusion: names a
    fused kernel that we do not have
use-te-activation-func use-transformer-engine-op-fuser fused-residual-rmsnorm
    use-fused-weighted-squared-relu: asks for a fused kernel; ours compute the same without fusion
disable-jit-fuser: nothing is compiled without --compile
te-rng-tracker inference-rng-tracker: random streams are our own, by layer and microbatch
cross-entropy-fusion-impl=native: --cross-entropy-loss-fusion uses this one
vocab-extra-ids=0: no ids are added
test-mode: layers do not test themselves while they run
enable-experimental: each feature has its own flag
# precision and optimizer
fp8-interval=#: without effect, as in Megatron-LM: delayed scaling updates its scales after each
    step
reuse-grad-buf-for-mxfp8-param-ag: weights of mxfp8 are gathered in their own type, into their own
    buffers
moe-router-padding-for-fp8 moe-router-padding-for-quantization: an expert's rows are padded within
    its product
accumulate-allreduce-grads-in-fp32: gradients are added in float32, and reduced so without
    --grad-reduce-in-bf16
num-distributed-optimizer-instances=#: optimizer state is sharded over all data-parallel ranks, so
    that each keeps less
outer-dp-sharding-strategy=no_shard: all data-parallel ranks are one group, over which tensors are
    sharded
megatron-fsdp-version=1|2 fsdp-double-buffer fsdp-manual-registration
    fsdp-db-use-persist-buf-on-alloc-fail megatron-fsdp-max-pool-double-buffer
    megatron-fsdp-enable-fine-grained-param-gather suggested-communication-unit-size=#
    torch-fsdp2-no-reshard-after-forward keep-fp8-transpose-cache: a stage is gathered as a whole;
    the table says for how many of its passes
megatron-fsdp-main-params-dtype=fp32 megatron-fsdp-main-grads-dtype=fp32|auto: main parameters and
    gradients are float32 without --main-params-dtype and --main-grads-dtype
megatron-fsdp-grad-comm-dtype=fp32|auto: gradients are reduced in float32 without
    --grad-reduce-in-bf16
muon-fp32-matmul-prec=medium|high: Newton-Schulz is computed in bfloat16 on a GPU and in float32 on
    a CPU
muon-tp-mode=duplicated|distributed: each tensor-parallel rank makes the whole matrix orthogonal
muon-use-syrk: names a kernel that we do not have; the products are the same
muon-scalar-optimizer=adam: adam updates all parameters that muon does not
# overlap, collectives, memory
overlap-param-gather-with-optimizer-step: weights are gathered in the next step, each stage's before
    its first forward
DDP-impl=local|torch: gradients are reduced out of flat buffers, stage by stage
use-nccl-ub disable-symmetric-registration high-priority-a2a-comm-stream
    nccl-communicator-config-path=* high-priority-stream-groups=*|...
    sharp-enabled-group=dp|dp_replica: NCCL has its defaults
no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding: --sequence-parallel
    sums and splits the embedding's output in one collective
train-sync-interval=#: the host waits for the device once a step
init-model-with-meta-device: a layer's weights are created on the device that keeps them
no-align-grad-reduce disable-align-grad-reduce no-align-param-gather: the table says when each stage
    is reduced and gathered; stages do not wait for each other
ddp-pad-buckets-for-high-nccl-busbw: each rank's part of a bucket is padded to 64 elements
ddp-average-in-collective: gradients are added up and divided in float32
overlap-p2p-communication overlap-p2p-communication-warmup-flush: the schedule's table orders
    messages and passes; there is nothing to set
defer-embedding-wgrad-compute wgrad-deferral-limit=#: zero-bubble schedules defer weight gradients
tp-comm-overlap-rs-dgrad no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag
    no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs disable-tp-comm-bulk-dgrad
    disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
    disable-tp-comm-split-ag disable-tp-comm-split-rs tp-comm-overlap-cfg=*
    tp-comm-bootstrap-backend=nccl|mpi|gloo: --tp-comm-overlap overlaps every collective of a linear
    layer with its products, or none
no-async-tensor-model-parallel-allreduce: the input's gradient is summed during the product for the
    weight's gradient
pipeline-model-parallel-comm-backend=nccl: --distributed-backend decides it
hierarchical-context-parallel-sizes=#|...: keys travel in one ring; --cp-comm-type a2a+p2p is p2p
disable-gloo-process-groups use-sharp create-all-gather-group: one process group per mesh axis
distribute-saved-activations: --sequence-parallel splits activations over tensor-parallel ranks
empty-unused-memory-level=0|1|2: torch's allocator keeps freed memory for the next step
cuda-graph-scope=*|... cuda-graph-modules=*|...: --cuda-graph-impl captures a stage's whole forward
    and backward
optimizer-cuda-graph: the update is launched kernel by kernel
local-rank=#: the launcher passes the rank in the environment
moe-flex-dispatcher-backend=deepep|hybridep|ncclep moe-enable-deepep moe-deepep-num-sms=#
    moe-hybridep-num-sms=# moe-flex-dispatcher-num-sms=# moe-shared-expert-overlap
    ep-overlap-early-attn-memory-release moe-hybridep-num-sms-preprocessing=#
    overlap-dispatch-backward-with-experts-wgrad: tokens go by torch.distributed's all-to-all;
    --overlap-moe-expert-parallel-comm overlaps it with computation
moe-grouped-gemm moe-permute-fusion moe-router-fusion moe-permute-fusion-into-hybridep: names a
    fused kernel; experts are one grouped product in bf16 on a GPU
moe-enable-routing-replay: the experts of a token are kept for recomputation
# data
no-create-attention-mask-in-dataloader: the loader makes no mask; attention is causal
no-mmap-bin-files dataloader-fast-cache-load dataloader-defer-npy-index-mmap: indices are mapped,
    tokens read ahead by --num-workers threads
per-dataset-sequences-path=*: the headers of the files say it
allow-ambiguous-pad-tokens: nothing is padded, and every id counts in the loss
num-dataset-builder-threads=#: indices are built in one thread, and kept in --data-cache-path
exit-signal-handler-for-dataloader: readers are threads and stop with their process
disable-msc: files are read from the file system
trust-remote-code: no code of a tokenizer's folder is run
no-use-tokenizer-model-from-checkpoint-args disable-use-tokenizer-model-from-checkpoint-args: the
    flags say which tokenizer is used
# checkpoints
use-dist-ckpt dist-ckpt-format=torch_dist: checkpoints are always distributed
ckpt-format=torch_dist|torch|torch_dcp|fsdp_dtensor: checkpoints are safetensors and JSON; megapipe
    convert writes Megatron-LM's
auto-detect-ckpt-format: a checkpoint's format is read off its folder
async-ckpt-use-cpu-shm use-persistent-ckpt-worker async-strategy=nvrx|mcore
    async-ckpt-cpu-priority=# async-ckpt-io-priority=# dist-ckpt-workers=#: for --async-save a
    process next to each rank writes from shared memory until the run ends
ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load
    ckpt-assume-constant-structure ckpt-fully-parallel-load-per-rank-objects
    ckpt-pg-tensors-cache-create
    ckpt-fully-parallel-load-exchange-algo=broadcast|gather_rounds|gather_object
    ckpt-fully-parallel-load-process-group=dp|ep_dp ckpt-fully-parallel-save-process-group=dp|ep_dp
    ckpt-pg-tensors-cache-path=*: every rank writes a part of its tensors, and reads the ones that
    it needs
no-strict-fsdp-dtensor-load disable-strict-fsdp-dtensor-load
    dist-ckpt-strictness=assume_ok_unexpected|log_unexpected|log_all|raise_unexpected|raise_all|
    return_unexpected|return_all|ignore_all: a missing or unexpected tensor always stops the load
dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient
    no-ckpt-load-validate-sharding-integrity disable-ckpt-load-validate-sharding-integrity
    dist-ckpt-save-pre-mcore-014 ckpt-drop-redundant-extra-state: a checkpoint's tensors must be
    exactly the model's, whatever layout wrote it
verify-integrity: every file's size and SHA-256 are checked before a load
no-save-tokenizer-assets disable-save-tokenizer-assets: no tokenizer file is copied
no-save-rng no-load-rng: there is no random state to keep: streams follow from the seed, the layer
    and the sample
# logs
no-one-logger: there is no such logger
no-barrier-with-level-1-timing: no timer adds a barrier
log-batch-size-to-tensorboard log-learning-rate-to-tensorboard: always in TensorBoard
no-log-loss-scale-to-tensorboard disable-log-loss-scale-to-tensorboard: TensorBoard shows it as one
    more curve
logging-level=# log-memory-interval=# straggler-ctrlr-port=# straggler-minmax-count=# log-energy
    disable-straggler-on-startup log-device-memory-used log-max-attention-logit
    record-memory-history measure-activation-memory dump-param-to-param-group-map=*
    memory-snapshot-path=* config-logger-dir=* profile-memory-iter=* app-tag-run-name=*
    app-tag-run-version=* one-logger-project=* one-logger-run-name=* one-logger-async otel-enabled
    otel-service-name=* otel-span-groups=*: not logged
nvtx-ranges: passes are labelled for torch's profiler
flight-recorder-dump-path=* flight-recorder-trace-buffer-size=# flight-recorder-include-stack-trace
    disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
    disable-flight-recorder-include-only-active no-flight-recorder-dump-on-timeout
    no-flight-recorder-extra-dump-on-exec no-flight-recorder-include-only-active: a rank that hangs
    is named with its pass; NCCL's recorder is left to TORCH_NCCL_ in the environment
# sail-sg/zero-bubble-pipeline-parallelism
enable-zb-runtime no-pre-communication-optimization: one executor runs every schedule
zero-bubble-pipeline-timers-start-iter=* zero-bubble-pipeline-timers-end-iter=*
    schedule-timer-start=* schedule-timer-end=*: passes' costs are counted from the model, not timed
offload-continuous-buffers auto-offload-time offload-overlap-sr: --cpu-offload copies at times that
    the table says, into buffers of few sizes
enable-exactly-numeric-match: every schedule gives the same numbers
num-seq-splits=1: a microbatch is one piece
"""


def rows_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield (names, sentence) of each row of a table in the form `NAMES: SENTENCE`.

    An indented line continues its row.
    """
    # A row goes on in lines that are indented.
    for row in re.sub(r"\n +", " ", text).splitlines():
        names, _, sentence = row.partition(": ")
        if sentence:
            yield names, sentence


def _noop_flags() -> Iterator[tuple[str, Noop]]:
    for names, because in rows_of(_ROWS):
        # A long list of values may continue on the next line.
        for word in names.replace("| ", "|").split():
            name, equals, values = word.partition("=")
            # A switch has no values; "".split("|") would have one.
            allowed = tuple(values.split("|")) if equals else ()
            yield f"--{name}", Noop(allowed, because)


NOOP_FLAGS = dict(_noop_flags())
"""Each flag that is accepted and sets nothing."""

_OLD = """
use-legacy-models overlap-p2p-communication no-async-tensor-model-parallel-allreduce
log-batch-size-to-tensorboard log-learning-rate-to-tensorboard no-pre-communication-optimization
schedule-timer-start schedule-timer-end measure-activation-memory DDP-impl
"""
OLD_FLAGS = frozenset(f"--{name}" for name in _OLD.split())
"""Names of older versions and of forks, which Megatron-LM's parser no longer has."""
