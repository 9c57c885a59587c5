"""Flags of the second class: what they ask for holds already, or is done in our own way with the same numbers.

One row per sentence: the names, the values they may have, and what happens instead. A flag that changes the numbers of
a training is never here.
"""

from __future__ import annotations

from typing import NamedTuple


class Holds(NamedTuple):
    """Why a flag may be given. values: those it may have; none for a switch, `*` for any, SEVERAL for any number."""

    values: tuple[str, ...]
    because: str


_SWITCH: tuple[str, ...] = ()
_ANY = ("*",)
SEVERAL = ("*", "...")
_UNFUSED = "names a fused kernel that we do not have"
_STREAMS = "there is no random state to keep: streams follow from the seed, the layer and the sample"
_FIXED = "the schedule's table orders messages and passes; there is nothing to set"
_SAVED = "every rank writes a share of what it holds, and reads what it needs"
_WRITER = "a process beside each rank writes for --async-save, from shared memory, as long as the run lives"
_STRICT = "a checkpoint's tensors must be exactly the model's, whatever layout wrote it"
_READ = "indices are mapped, tokens read ahead by --num-workers threads"
_COLLECTED = "Python collects garbage when it wants to"
_TP_OVERLAP = "collectives over tensor-parallel ranks do not overlap with products"
_LAUNCHED = "kernels are launched one by one, without CUDA graphs"
_NOT_LOGGED = "not logged"
_NOT_MOVED = "acts beside --cpu-offload, which is refused"
_HANGS = "a rank that hangs is named with its pass; NCCL's recorder is left to TORCH_NCCL_ in the environment"
_ONE_ENGINE = "one executor runs every schedule"

_ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    # model
    ("use-mcore-models use-legacy-models", _SWITCH, "there is one model"),
    ("use-cpu-initialization", _SWITCH, "initial weights are the same under every tp, pp and schedule"),
    ("attention-softmax-in-fp32", _SWITCH, "the softmax of attention is computed in float32"),
    (
        "apply-query-key-layer-scaling",
        _SWITCH,
        "the factor cancels out; it guards scores of fp16, which are float32 here",
    ),
    ("openai-gelu", _SWITCH, "without effect, as in Megatron-LM: --no-bias-gelu-fusion chooses the form of GELU"),
    ("no-position-embedding", _SWITCH, "rotary positions add nothing to the embedding"),
    (
        "use-flash-attn",
        _SWITCH,
        "torch takes its flash kernel where it has one; --attention-backend flash insists",
    ),
    ("flash-attention-version", _ANY, "the kernel is torch's"),
    ("softmax-type", ("vanilla",), "the softmax is the plain one"),
    ("rotary-seq-len-interpolation-factor", ("1",), "positions are not interpolated"),
    (
        "no-masked-softmax-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm "
        "no-gradient-accumulation-fusion no-gradient-reduce-div-fusion",
        _SWITCH,
        _UNFUSED,
    ),
    (
        "use-te-activation-func use-transformer-engine-op-fuser fused-residual-rmsnorm use-fused-weighted-squared-relu",
        _SWITCH,
        "asks for a fused kernel; ours compute the same unfused",
    ),
    ("disable-jit-fuser", _SWITCH, "nothing is compiled without --compile"),
    ("te-rng-tracker inference-rng-tracker", _SWITCH, "random streams are our own, by layer and microbatch"),
    ("cross-entropy-fusion-impl", ("native",), "what --cross-entropy-loss-fusion is made of"),
    ("vocab-extra-ids", ("0",), "no ids are added"),
    ("test-mode", _SWITCH, "layers do not test themselves while they run"),
    ("enable-experimental", _SWITCH, "each feature has its own flag"),
    # precision and optimizer
    (
        "accumulate-allreduce-grads-in-fp32",
        _SWITCH,
        "gradients are added in float32, and reduced so without --grad-reduce-in-bf16",
    ),
    (
        "num-distributed-optimizer-instances",
        _ANY,
        "optimizer state is split over all data-parallel ranks, which is less",
    ),
    ("data-parallel-sharding-strategy", ("no_shard",), "parameters and gradients are whole on each rank"),
    # overlap, collectives, memory
    (
        "overlap-param-gather-with-optimizer-step",
        _SWITCH,
        "weights are gathered in the next step, each stage's before its first forward",
    ),
    ("DDP-impl", ("local", "torch"), "gradients are reduced out of flat buffers, stage by stage"),
    ("use-nccl-ub disable-symmetric-registration high-priority-a2a-comm-stream", _SWITCH, "NCCL has its defaults"),
    (
        "no-clone-scatter-output-in-embedding disable-clone-scatter-output-in-embedding",
        _SWITCH,
        "--sequence-parallel sums and splits the embedding's output in one collective",
    ),
    ("train-sync-interval", _ANY, "the host waits for the device once a step"),
    ("init-model-with-meta-device", _SWITCH, "a layer's weights are made where they stay"),
    (
        "no-align-grad-reduce disable-align-grad-reduce no-align-param-gather",
        _SWITCH,
        "each stage is reduced and gathered where the table says, at no common moment",
    ),
    ("ddp-pad-buckets-for-high-nccl-busbw", _SWITCH, "each rank's part of a bucket is padded to 64 elements"),
    ("ddp-average-in-collective", _SWITCH, "gradients are added up and divided in float32"),
    ("overlap-p2p-communication overlap-p2p-communication-warmup-flush", _SWITCH, _FIXED),
    ("defer-embedding-wgrad-compute delay-wgrad-compute", _SWITCH, "zero-bubble schedules defer weight gradients"),
    ("wgrad-deferral-limit", _ANY, "zero-bubble schedules defer weight gradients"),
    (
        "tp-comm-overlap tp-comm-overlap-rs-dgrad no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag "
        "no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs disable-tp-comm-bulk-dgrad "
        "disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag "
        "disable-tp-comm-split-rs no-async-tensor-model-parallel-allreduce",
        _SWITCH,
        _TP_OVERLAP,
    ),
    ("tp-comm-overlap-cfg tp-comm-bootstrap-backend", _ANY, _TP_OVERLAP),
    ("pipeline-model-parallel-comm-backend", ("nccl",), "what --distributed-backend says"),
    (
        "hierarchical-context-parallel-sizes",
        SEVERAL,
        "keys travel in one ring; --cp-comm-type a2a+p2p is p2p",
    ),
    ("nccl-communicator-config-path high-priority-stream-groups sharp-enabled-group", _ANY, "NCCL has its defaults"),
    (
        "disable-gloo-process-groups use-sharp create-all-gather-group",
        _SWITCH,
        "one process group per mesh axis",
    ),
    (
        "distribute-saved-activations",
        _SWITCH,
        "--sequence-parallel splits activations over tensor-parallel ranks",
    ),
    ("empty-unused-memory-level", ("0", "1", "2"), "torch's allocator keeps freed memory for the next step"),
    ("manual-gc no-manual-gc-eval disable-manual-gc-eval", _SWITCH, _COLLECTED),
    ("manual-gc-interval", _ANY, _COLLECTED),
    ("cuda-graph-impl cuda-graph-warmup-steps", _ANY, _LAUNCHED),
    ("cuda-graph-scope cuda-graph-modules", SEVERAL, _LAUNCHED),
    ("enable-cuda-graph external-cuda-graph optimizer-cuda-graph", _SWITCH, _LAUNCHED),
    ("local-rank", _ANY, "the launcher passes the rank in the environment"),
    ("expert-model-parallel-size", ("1",), "there are no experts"),
    ("expert-tensor-parallel-size", _ANY, "there are no experts"),
    # data
    ("no-create-attention-mask-in-dataloader", _SWITCH, "the loader makes no mask; attention is causal"),
    ("no-mmap-bin-files dataloader-fast-cache-load dataloader-defer-npy-index-mmap", _SWITCH, _READ),
    ("per-dataset-sequences-path", _ANY, "the headers of the files say it"),
    ("allow-ambiguous-pad-tokens", _SWITCH, "nothing is padded, and no id loses its loss for being a pad"),
    ("num-dataset-builder-threads", _ANY, "indices are built in one thread, and kept in --data-cache-path"),
    ("exit-signal-handler-for-dataloader", _SWITCH, "readers are threads and stop with their process"),
    ("disable-msc", _SWITCH, "files are read from the file system"),
    ("trust-remote-code", _SWITCH, "no code of a tokenizer's folder is run"),
    (
        "no-use-tokenizer-model-from-checkpoint-args disable-use-tokenizer-model-from-checkpoint-args",
        _SWITCH,
        "the tokenizer is that of the flags",
    ),
    # checkpoints
    ("use-dist-ckpt", _SWITCH, "checkpoints are always distributed"),
    ("dist-ckpt-format", ("torch_dist",), "checkpoints are always distributed"),
    ("ckpt-format", ("torch_dist", "torch"), "checkpoints are torch's distributed ones, stored as safetensors"),
    ("auto-detect-ckpt-format", _SWITCH, "a checkpoint's format is read off its folder"),
    ("async-ckpt-use-cpu-shm use-persistent-ckpt-worker", _SWITCH, _WRITER),
    ("async-strategy async-ckpt-cpu-priority async-ckpt-io-priority dist-ckpt-workers", _ANY, _WRITER),
    (
        "ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure "
        "ckpt-fully-parallel-load-per-rank-objects ckpt-pg-tensors-cache-create",
        _SWITCH,
        _SAVED,
    ),
    (
        "ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-process-group "
        "ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-path",
        _ANY,
        _SAVED,
    ),
    ("dist-ckpt-strictness", _ANY, "a missing or unexpected tensor always stops the load"),
    ("dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient", _SWITCH, _STRICT),
    (
        "no-ckpt-load-validate-sharding-integrity disable-ckpt-load-validate-sharding-integrity "
        "dist-ckpt-save-pre-mcore-014 ckpt-drop-redundant-extra-state",
        _SWITCH,
        _STRICT,
    ),
    ("verify-integrity", _SWITCH, "every file's size and SHA-256 are checked before a load"),
    ("no-save-tokenizer-assets disable-save-tokenizer-assets", _SWITCH, "no tokenizer file is copied"),
    ("no-save-rng no-load-rng", _SWITCH, _STREAMS),
    # logs
    ("no-one-logger", _SWITCH, "there is no such logger"),
    ("no-barrier-with-level-1-timing", _SWITCH, "no timer adds a barrier"),
    ("log-batch-size-to-tensorboard log-learning-rate-to-tensorboard", _SWITCH, "always in TensorBoard"),
    ("no-log-loss-scale-to-tensorboard disable-log-loss-scale-to-tensorboard", _SWITCH, "it is one more curve there"),
    ("logging-level log-memory-interval straggler-ctrlr-port straggler-minmax-count", _ANY, _NOT_LOGGED),
    (
        "log-energy disable-straggler-on-startup log-device-memory-used "
        "log-max-attention-logit record-memory-history measure-activation-memory dump-param-to-param-group-map",
        _SWITCH,
        _NOT_LOGGED,
    ),
    ("memory-snapshot-path config-logger-dir profile-memory-iter", _ANY, _NOT_LOGGED),
    ("nvtx-ranges", _SWITCH, "passes are labelled for torch's profiler"),
    ("app-tag-run-name app-tag-run-version one-logger-project one-logger-run-name", _ANY, _NOT_LOGGED),
    ("one-logger-async", _SWITCH, _NOT_LOGGED),
    ("otel-enabled", _SWITCH, _NOT_LOGGED),
    ("otel-service-name", _ANY, _NOT_LOGGED),
    ("otel-span-groups", SEVERAL, _NOT_LOGGED),
    ("flight-recorder-dump-path flight-recorder-trace-buffer-size", _ANY, _HANGS),
    (
        "flight-recorder-include-stack-trace disable-flight-recorder-dump-on-timeout "
        "disable-flight-recorder-extra-dump-on-exec disable-flight-recorder-include-only-active "
        "no-flight-recorder-dump-on-timeout no-flight-recorder-extra-dump-on-exec "
        "no-flight-recorder-include-only-active",
        _SWITCH,
        _HANGS,
    ),
    # sail-sg/zero-bubble-pipeline-parallelism
    ("enable-zb-runtime no-pre-communication-optimization", _SWITCH, _ONE_ENGINE),
    (
        "zero-bubble-pipeline-timers-start-iter zero-bubble-pipeline-timers-end-iter schedule-timer-start "
        "schedule-timer-end",
        _ANY,
        "passes' costs are counted from the model, not timed",
    ),
    ("offload-time offload-chunk-num", _ANY, _NOT_MOVED),
    ("offload-continuous-buffers auto-offload-time offload-overlap-sr", _SWITCH, _NOT_MOVED),
    ("enable-exactly-numeric-match", _SWITCH, "every schedule gives the same numbers"),
    ("num-seq-splits", ("1",), "a microbatch is one piece"),
)

HOLDS: dict[str, Holds] = {
    f"--{name}": Holds(values, because) for names, values, because in _ROWS for name in names.split()
}

_OLD = """
use-legacy-models overlap-p2p-communication no-async-tensor-model-parallel-allreduce log-batch-size-to-tensorboard
log-learning-rate-to-tensorboard no-pre-communication-optimization schedule-timer-start schedule-timer-end
measure-activation-memory DDP-impl
"""
OLD_FLAGS = frozenset(f"--{name}" for name in _OLD.split())
"""Names of older versions and of forks, which Megatron-LM's parser no longer has."""
