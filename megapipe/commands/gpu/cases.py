"""The cases of megapipe gpu-check: small trainings, the results they must have, and scripts.

A training runs with the flags of SHAPE, then SIZES, then its own. Of a flag given twice the last
counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

# What every training has: 1F1B on one rank, with the parts of a modern GPT.
SHAPE = (
    "--pipeline-schedule 1f1b --group-query-attention --num-query-groups 2 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 6 --lr 1e-3 --lr-decay-style constant --mock-data "
    "--tokenizer-type NullTokenizer --eval-iters 0 --distributed-timeout-minutes 2 "
)
# A device must have enough work to be measured; a CPU must end within seconds.
SIZES = {
    "cuda": "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
    "--max-position-embeddings 512 --vocab-size 4095",
    # The split leaves few training documents, whose index is made quickly.
    "cpu": "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --vocab-size 127 --split 1,0,99",
}
# Models of known sizes, whose memory and speed are compared with predictions and other programs.
GPT2_124M = (
    "--bf16 --num-layers 12 --hidden-size 768 --num-attention-heads 12 --num-query-groups 12 "
    "--seq-length 1024 --max-position-embeddings 1024 --vocab-size 50303 --micro-batch-size 8 "
    "--global-batch-size 32 --train-iters 10"
)
LARGE = (
    "--bf16 --num-layers 24 --num-attention-heads 16 --num-query-groups 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 50303 --cross-entropy-loss-fusion "
    "--global-batch-size 32 --train-iters 10"
)
LARGE_LAYER = (
    "--hidden-size 2048 --num-attention-heads 16 --num-query-groups 16 --seq-length 2048 "
    "--vocab-size 50303 --max-position-embeddings 2048"
)
GPT3_350M = f"{LARGE} --hidden-size 1024 --micro-batch-size 8"
GPT3_1_3B = f"{LARGE} --hidden-size 2048 --micro-batch-size 4"
# Scripts. {device} and {nanogpt} are the flags of megapipe gpu-check, {folder} is its --output.
KERNEL = "megapipe/commands/gpu/kernels.py --device {device} --only"
MEASURE = "megapipe/commands/gpu/measures.py --device {device} --only"
RATES = "-m megapipe rehearse --world-size 4 --ranks 1 --save-rates {folder}/rates.json --"
MIDDLE = "--pipeline-model-parallel-size 4 --num-layers 4"
NANOGPT = (
    "tools/bench/training.py --device cuda --precision bf16 --compile --batch 8 --least 1 "
    "--nanogpt {nanogpt}"
)
# Precision and layers.
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe"
TE = "--transformer-impl transformer_engine"
# With it, trainings of the same numbers in another order are bitwise equal.
EXACT = "--deterministic-mode"
DROPOUT = f"{EXACT} --attention-dropout 0.1 --hidden-dropout 0.1"
V = f"{EXACT} --pipeline-schedule dualpipe-v --recompute-granularity full"
# Two cases share this folder: one saves, and the next loads.
SAVED = "{folder}/saved"
GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 2"
# Several ranks. NCCL posts messages one by one, in batches, or around a ring.
BATCHED = "--no-overlap-p2p-communication"
PP2 = f"{EXACT} --pipeline-model-parallel-size 2"
DEEP = f"{EXACT} --num-layers 16 --global-batch-size 32"
PP8 = f"{DEEP} --pipeline-model-parallel-size 8 --pipeline-schedule"
WIDE = (
    f"{GPT3_1_3B} --num-layers 32 --micro-batch-size 1 "
    "--pipeline-model-parallel-size 8 --pipeline-schedule zb-v"
)
OVERLAPS = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 2"
)
# Tensor and data parallelism, experts, and passes that are of a schedule's own.
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
ZERO_FP8 = f"{FP8} tensorwise {EXACT} --use-distributed-optimizer"
GRID = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
SHARED = "--pipeline-model-parallel-size 4 --vocab-parallel-pipeline --pipeline-schedule zb-h1"
LATE = (
    "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h2 --enable-optimizer-post-validation"
)
EP = "--expert-model-parallel-size 4 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32"


@dataclass(frozen=True)
class Case:
    """A training of `megapipe gpu-check` with the criterion by which it passes, or a script.

    The criterion is `memory` if given, else a comparison with the case `like`. A case with neither
    must have a falling loss.

    Attributes:
        name: the name in the report.
        flags: the flags of the training. {folder} is a folder in which the case may write.
        like: the name of another case, the reference. Losses must be equal in each step that both
            cases train.
        within: largest relative difference of a loss from the reference's; with 0 losses and
            gradient norms must be bitwise equal.
        memory: largest relative difference of the peak memory from the plan's prediction; None
            does not compare.
        mfu: smallest fraction of the device's bf16 peak, for a device whose peak is known.
        script: the arguments of Python, instead of a training; {folder} is the value of
            --output. The case passes with exit status 0, and the last line of output is its figure.
        needs: a package, or a flag of megapipe gpu-check. The case is skipped if the package is
            not installed, or the flag not given.
        ranks: the number of processes.
        devices: the devices on which the case makes sense.
        seconds: the time limit.
    """

    name: str
    flags: str = ""
    like: str | None = None
    within: float = 0.0
    memory: float | None = None
    mfu: float = 0.0
    script: str | None = None
    needs: str | None = None
    ranks: int = 1
    devices: tuple[str, ...] = ("cpu", "cuda")
    seconds: float = 90.0

    @property
    def emulates(self) -> bool:
        """Whether an emulated GPU can run this case: a small training, without a compiler."""
        if "cuda" not in self.devices or self.script is not None or self.needs is not None:
            return False
        return self.memory is None and not {"--hidden-size", "--compile"} & {*self.flags.split()}


on_gpu = partial(Case, devices=("cuda",))
# The tolerances of 1e-4 and of memory are expectations, not yet confirmed on a GPU.
CASES = (
    # Operations and measures that need no training.
    Case("kernel: weight gradient deferred to W", script=f"{KERNEL} weight_grad"),
    Case("kernel: fused loss", script=f"{KERNEL} fused_loss"),
    Case("kernel: attention with dropout", script=f"{KERNEL} dropout_attention"),
    on_gpu("tests for a GPU", script="-m pytest -q -m gpu", needs="pytest", seconds=240),
    Case("ceilings", script=f"{MEASURE} ceilings"),
    # The file rates.json for --rates of megapipe plan: passes of a layer, products, messages.
    Case(
        "rates of this CPU",
        script=f"{RATES} {SHAPE} {SIZES['cpu']} {MIDDLE} --distributed-backend gloo",
        devices=("cpu",),
    ),
    on_gpu("rates of this GPU", script=f"{RATES} {SHAPE} {LARGE_LAYER} {MIDDLE} --bf16"),
    Case("B and W separate: time", script=f"{MEASURE} split"),
    Case("every schedule of one rank", script=f"{MEASURE} schedules"),
    on_gpu("CUDA graphs: bits and time", script=f"{MEASURE} graphs"),
    Case("one layer a stage: the device waits for the host", script=f"{MEASURE} host"),
    # Each precision against the next wider one. Small models lose little by rounding.
    Case("float32"),
    on_gpu("float32 on the CPU", "--distributed-backend gloo", "float32", 1e-4),
    Case("bf16", "--bf16", "float32", 2e-2),
    Case("bf16, fused loss", "--bf16 --cross-entropy-loss-fusion", "bf16", 1e-2),
    Case("fp16, loss scaling", "--fp16 --initial-loss-scale 1024", "float32", 2e-2),
    Case("FP8, delayed", f"{FP8} delayed", "bf16", 2e-2),
    on_gpu("FP8, tensorwise", f"{FP8} tensorwise {EXACT}", "bf16", 2e-2),
    on_gpu(
        "FP8, tensorwise, on the CPU",
        f"{FP8} tensorwise --distributed-backend gloo",
        "FP8, tensorwise",
        5e-3,
    ),
    on_gpu(
        "FP8, tensorwise, zb-h1",
        f"{FP8} tensorwise {EXACT} --pipeline-schedule zb-h1",
        "FP8, tensorwise",
    ),
    on_gpu("FP8, blockwise", f"{FP8} blockwise", "bf16", 2e-2),
    # One rank: the order of passes, graphs, recomputation and a restart change no bit.
    Case("deterministic", EXACT, "float32", 1e-4),
    Case("deterministic, again", EXACT, "deterministic"),
    Case("zb-h1: B and W separate", f"{EXACT} --pipeline-schedule zb-h1", "deterministic"),
    on_gpu("CUDA graphs", f"{EXACT} {GRAPHS}", "deterministic"),
    on_gpu("CUDA graphs, dualpipe-v, full recompute", f"{V} {GRAPHS}", "deterministic"),
    Case(
        "dualpipe-v, full recompute, saves",
        f"{V} --save {SAVED} --save-interval 3",
        "deterministic",
    ),
    Case(
        "dualpipe-v, resumed at step 3",
        f"{V} --load {SAVED} --ckpt-step 3",
        "dualpipe-v, full recompute, saves",
    ),
    # Masks of dropout are drawn by layer and token, so recomputation draws them again.
    Case("dropout", DROPOUT, "float32", 0.1),
    Case(
        "dropout, zb-h1, full recompute",
        f"{DROPOUT} --pipeline-schedule zb-h1 --recompute-granularity full",
        "dropout",
    ),
    Case("window", "--window-size 7,0"),
    on_gpu("window on the CPU", "--window-size 7,0 --distributed-backend gloo", "window", 1e-4),
    on_gpu("compiled layers", "--compile", "float32", 1e-4, seconds=240),
    # Memory by the plan, and speed, of models that fill a device.
    on_gpu("124M bf16: memory", GPT2_124M, memory=0.25),
    on_gpu(
        "124M bf16, fused loss: memory", f"{GPT2_124M} --cross-entropy-loss-fusion", memory=0.25
    ),
    on_gpu("124M bf16, zb-h1", f"{GPT2_124M} --pipeline-schedule zb-h1", "124M bf16: memory", 1e-2),
    on_gpu("350M bf16", GPT3_350M, memory=0.25),
    on_gpu("350M bf16, compiled layers", f"{GPT3_350M} --compile", "350M bf16", 1e-2, seconds=240),
    on_gpu("1.3B bf16", GPT3_1_3B, memory=0.25, mfu=0.5),
    on_gpu("1.3B bf16, compiled layers", f"{GPT3_1_3B} --compile", "1.3B bf16", 1e-2, seconds=240),
    on_gpu("1.3B FP8, tensorwise", f"{GPT3_1_3B} {FP8} tensorwise", "1.3B bf16", 2e-2),
    # Other programs and libraries.
    on_gpu("124M against nanoGPT", script=f"{NANOGPT} --size 124m", needs="nanogpt", seconds=240),
    on_gpu("350M against nanoGPT", script=f"{NANOGPT} --size 350m", needs="nanogpt", seconds=240),
    on_gpu("Transformer Engine", f"--bf16 {TE}", "bf16", 2e-2, needs="transformer_engine"),
    on_gpu(
        "1.3B, Transformer Engine",
        f"{GPT3_1_3B} {TE}",
        "1.3B bf16",
        1e-2,
        needs="transformer_engine",
    ),
    on_gpu(
        "1.3B FP8, Transformer Engine",
        f"{GPT3_1_3B} {FP8} tensorwise {TE}",
        "1.3B bf16",
        2e-2,
        needs="transformer_engine",
    ),
    # Pipelines: the way of a message changes no bit.
    Case("pp 2: plain messages", PP2, "deterministic", ranks=2),
    Case("pp 2: batched messages", f"{PP2} {BATCHED}", "deterministic", ranks=2),
    Case("pp 2: ring", f"{PP2} --use-ring-exchange-p2p", "deterministic", ranks=2),
    on_gpu(
        "pp 2: CUDA graphs", f"{PP2} {GRAPHS} --pipeline-schedule zb-h1", "deterministic", ranks=2
    ),
    Case("pp 2: zb-v", f"{PP2} --pipeline-schedule zb-v --num-layers 4", ranks=2),
    # Sums over ranks have another order, so these are equal up to rounding.
    Case("tp 2, sequence parallel", TP2, "float32", 1e-4, ranks=2),
    on_gpu("tp 2: 1.3B", f"{GPT3_1_3B} {TP2}", "1.3B bf16", 1e-2, ranks=2),
    on_gpu(
        "tp 2: 1.3B, in pieces", f"{GPT3_1_3B} {TP2} --tp-comm-overlap", "1.3B bf16", 1e-2, ranks=2
    ),
    Case("dp 2: ZeRO-1", "--use-distributed-optimizer", "float32", 1e-4, ranks=2),
    on_gpu("dp 2: FP8", ZERO_FP8, "bf16", 2e-2, ranks=2),
    on_gpu(
        "dp 2: FP8, weights gathered as FP8", f"{ZERO_FP8} --fp8-param-gather", "dp 2: FP8", ranks=2
    ),
    # Eight ranks, whose pipelines need a deeper model.
    Case("16 layers", DEEP),
    Case("pp 8: 1f1b", f"{PP8} 1f1b", "16 layers", ranks=8),
    Case("pp 8: zb-v", f"{PP8} zb-v", "16 layers", ranks=8),
    Case("pp 8: dualpipe", f"{PP8} dualpipe", "16 layers", 1e-4, ranks=8),
    on_gpu("pp 8: 1.7B, plain messages", WIDE, ranks=8),
    on_gpu("pp 8: 1.7B, batched", f"{WIDE} {BATCHED}", "pp 8: 1.7B, plain messages", 1e-2, ranks=8),
    Case(
        "tp 2, pp 2, dp 2, all overlaps",
        f"{GRID} --sequence-parallel --tp-comm-overlap {OVERLAPS}",
        "float32",
        1e-4,
        ranks=8,
    ),
    Case(
        "cp 2, pp 2, dp 2",
        "--context-parallel-size 2 --pipeline-model-parallel-size 2",
        "float32",
        1e-4,
        ranks=8,
    ),
    Case("pp 4: shared vocabulary", f"{DEEP} {SHARED}", "16 layers", 1e-4, ranks=4),
    Case("pp 4: post-validation", f"{DEEP} {LATE}", "16 layers", 1e-4, ranks=4),
    Case("experts", EXPERTS),
    Case("experts over 4, pp 2", f"{EXPERTS} {EP}", "experts", 1e-4, ranks=8),
)
