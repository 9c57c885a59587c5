"""Published runs: what took how long, where it stands, and what of the layout is assumed here.

Every number was compared with the text of its source on 2026-11-28.
"""

from __future__ import annotations

from typing import NamedTuple

from tools.bench.published.models import (
    DEEPSEEK_V3,
    ENDS_AS_LAYERS,
    FULL,
    LLAMA_2_13B,
    LLAMA_2_70B,
    LLAMA_3_8B,
    LLAMA_3_70B,
    LLAMA_3_405B,
    MIXTRAL_8X7B,
    MIXTRAL_8X22B,
    QWEN2_57B,
    QWEN3_30B,
    SELECTIVE,
    SHARDED,
    gpt,
    layout,
)

NARAYANAN = "arXiv 2104.04473, table 1"
KORTHIKANTI = "arXiv 2205.05198, tables 3 and 5"
LLAMA_3 = "arXiv 2407.21783, table 4"
MEGASCALE = "arXiv 2402.15627, tables 1 and 2 (its Megatron-LM)"
TORCHTITAN = "torchtitan, docs/performance.md at 04133643"
MEGATRON_MOE = "Megatron-LM, megatron/core/transformer/moe/README.md at 022bcb5a"
FOLDING = "arXiv 2504.14960, tables 3 and 4"
AUTOMODEL = "NeMo Automodel, docs/performance-summary.md at 01926a5c"
DEEPSEEK = "arXiv 2412.19437, sections 1, 3.2 and 4.2"

ONE_OF_EACH = "microbatches of one sequence and one stage on a rank"


class Run(NamedTuple):
    """A published run. It has one of `seconds`, `tflops`, `narayanan`, `mfu` and `tokens`.

    Attributes:
        name: the model.
        source: where the numbers stand.
        device: a name of DEVICES.
        gpus: the number of devices.
        flags: the model, the layout and the batch.
        seconds: published seconds of a step.
        tflops: published TFLOP/s of a device, of model FLOPs.
        narayanan: the same by formula 3 of arXiv 2104.04473, with the recomputed forward.
        mfu: published share of the device's peak.
        tokens: published tokens per second of a device.
        assumed: what the source leaves open, and what stands for it here.
        eight_bits: it was trained in FP8, which the rates do not know.
    """

    name: str
    source: str
    device: str
    gpus: int
    flags: str
    seconds: float = 0.0
    tflops: float = 0.0
    narayanan: float = 0.0
    mfu: float = 0.0
    tokens: float = 0.0
    assumed: str = ""
    eight_bits: bool = False


def _narayanan(
    name: str,
    gpus: int,
    size: tuple[int, int, int],
    ranks: tuple[int, int],
    batch: int,
    tflops: float,
) -> Run:
    """Return a row of table 1 of Narayanan et al.

    Args:
        size: (layers, hidden size, heads).
        ranks: (tensor-parallel size, pipeline-parallel size).
    """
    tp, pp = ranks
    flags = f"{gpt(*size)} {layout(batch, tp=tp, pp=pp)} {FULL}"
    return Run(name, NARAYANAN, "a100", gpus, flags, narayanan=tflops, assumed=ONE_OF_EACH)


_LLAMA_405B = (
    f"{LLAMA_3_405B} {layout(2048, tp=8, pp=16, chunks=8)} --sequence-parallel {ENDS_AS_LAYERS}"
)
_LLAMA_ASSUMED = "eight stages on a rank; their FLOPs are counted as ours"
_GPT3_OF_MEGASCALE = f"{gpt(96, 12288, 128, 64000)} {SELECTIVE}"
_MEGASCALE_ASSUMED = "microbatches of one sequence, selective recomputation; A100s of 80 GB"
_SHARDED_13B = f"{SHARDED} --pipeline-schedule breadth-first --num-virtual-stages-per-pipeline-rank"
_V3_LAYOUT = "--pipeline-model-parallel-layout Ett|(tt|)*28(t|)*2tL"
_BY_64 = f"{DEEPSEEK_V3} {FULL} {_V3_LAYOUT}"
_FOLDED = "as many stages on a rank as it has layers"

RUNS = (
    _narayanan("1.7B", 32, (24, 2304, 24), (1, 1), 512, 137),
    _narayanan("3.6B", 64, (30, 3072, 32), (2, 1), 512, 138),
    _narayanan("7.5B", 128, (36, 4096, 32), (4, 1), 512, 142),
    _narayanan("18.4B", 256, (40, 6144, 48), (8, 1), 1024, 135),
    _narayanan("39.1B", 512, (48, 8192, 64), (8, 2), 1536, 138),
    _narayanan("76.1B", 1024, (60, 10240, 80), (8, 4), 1792, 140),
    _narayanan("145.6B", 1536, (80, 12288, 96), (8, 8), 2304, 148),
    _narayanan("310.1B", 1920, (96, 16384, 128), (8, 16), 2160, 155),
    _narayanan("529.6B", 2520, (105, 20480, 128), (8, 35), 2520, 163),
    _narayanan("1008B", 3072, (128, 25600, 160), (8, 64), 3072, 163),
    Run(
        "22B",
        KORTHIKANTI,
        "a100",
        8,
        f"{gpt(48, 6144, 64)} {layout(4, micro=4, tp=8)} {SELECTIVE}",
        seconds=1.10,
    ),
    Run(
        "175B",
        KORTHIKANTI,
        "a100",
        64,
        f"{gpt(96, 12288, 96)} {layout(64, tp=8, pp=8, chunks=3)} {SELECTIVE}",
        seconds=13.75,
    ),
    Run(
        "530B",
        KORTHIKANTI,
        "a100",
        280,
        f"{gpt(105, 20480, 128)} {layout(280, tp=8, pp=35, chunks=3)} {SELECTIVE}",
        seconds=37.83,
    ),
    Run(
        "1T",
        KORTHIKANTI,
        "a100",
        512,
        f"{gpt(128, 25600, 160)} {layout(512, tp=8, pp=64)} {SELECTIVE}",
        seconds=71.49,
    ),
    Run("Llama 3 405B", LLAMA_3, "h100", 8192, _LLAMA_405B, tflops=430, assumed=_LLAMA_ASSUMED),
    Run("Llama 3 405B", LLAMA_3, "h100", 16384, _LLAMA_405B, tflops=400, assumed=_LLAMA_ASSUMED),
    Run(
        "GPT-3 175B",
        MEGASCALE,
        "a100",
        256,
        f"{_GPT3_OF_MEGASCALE} {layout(768, tp=8, pp=8, chunks=6)}",
        seconds=40.0,
        assumed=_MEGASCALE_ASSUMED,
    ),
    Run(
        "GPT-3 175B",
        MEGASCALE,
        "a100",
        3072,
        f"{_GPT3_OF_MEGASCALE} {layout(6144, tp=8, pp=8, chunks=6)}",
        seconds=29.02,
        assumed=_MEGASCALE_ASSUMED,
    ),
    Run(
        "Llama 2 13B",
        TORCHTITAN,
        "a100",
        64,
        f"{LLAMA_2_13B} {layout(128, micro=2)} {_SHARDED_13B} 40",
        tokens=2162,
    ),
    Run(
        "Llama 2 70B",
        TORCHTITAN,
        "a100",
        64,
        f"{LLAMA_2_70B} {layout(128, micro=2)} {_SHARDED_13B} 80 {FULL}",
        tokens=353,
    ),
    Run(
        "Llama 3 8B",
        TORCHTITAN,
        "a100",
        64,
        f"{LLAMA_3_8B} {layout(64)} {_SHARDED_13B} 32 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        tokens=2904,
        assumed="all layers are recomputed, theirs every second",
    ),
    Run(
        "Llama 3 70B",
        TORCHTITAN,
        "a100",
        64,
        f"{LLAMA_3_70B} {layout(64)} {_SHARDED_13B} 80 {FULL}",
        tokens=331,
    ),
    Run(
        "Mixtral 8x7B",
        MEGATRON_MOE,
        "h100",
        64,
        f"{MIXTRAL_8X7B} {layout(256, pp=4, chunks=8, ep=8)} "
        "--overlap-grad-reduce --overlap-param-gather",
        tflops=468,
        assumed="the page's reference layout and its script are those of its 468 TFLOP/s",
    ),
    Run(
        "Mixtral 8x22B",
        FOLDING,
        "h100",
        128,
        f"{MIXTRAL_8X22B} {layout(256, tp=2, pp=8, chunks=7, ep=8)} --sequence-parallel",
        mfu=0.493,
        assumed=_FOLDED,
    ),
    Run(
        "Mixtral 8x22B",
        FOLDING,
        "h100",
        1024,
        f"{MIXTRAL_8X22B} {layout(1024, tp=2, pp=8, chunks=7, ep=8)} --sequence-parallel",
        mfu=0.449,
        assumed=_FOLDED,
    ),
    Run(
        "Qwen2 57B-A14B",
        FOLDING,
        "h100",
        64,
        f"{QWEN2_57B} {layout(256, tp=2, pp=4, chunks=7, ep=4)} --sequence-parallel",
        mfu=0.390,
        assumed=_FOLDED,
    ),
    Run(
        "Qwen3 30B-A3B",
        AUTOMODEL,
        "h100",
        8,
        f"{QWEN3_30B} {layout(512, micro=4, ep=8)} {FULL}",
        seconds=21.773,
        assumed="weights stay whole between microbatches",
    ),
    Run(
        "DeepSeek-V3",
        AUTOMODEL,
        "h100",
        256,
        f"{_BY_64} {layout(512, pp=4, chunks=8, ep=64)}",
        seconds=8.18,
    ),
    Run(
        "DeepSeek-V3",
        AUTOMODEL,
        "h100",
        1024,
        f"{_BY_64} {layout(8192, pp=4, chunks=8, ep=64)}",
        seconds=37.87,
    ),
    Run(
        "DeepSeek-V3",
        DEEPSEEK,
        "h800",
        2048,
        f"{DEEPSEEK_V3} {layout(15360, pp=16, ep=64)} --pipeline-schedule dualpipe "
        "--overlap-moe-expert-parallel-comm --mtp-num-layers 1 --recompute-granularity selective "
        "--recompute-modules layernorm mla_up_proj "
        "--pipeline-model-parallel-layout Et*3|(t*4|)*14ttmL",
        # 180,000 GPU hours for 1e12 tokens, steps of 15,360 sequences of 4,096 tokens.
        seconds=180_000 * 3600 / 2048 * 15_360 * 4096 / 1e12,
        assumed="the split, whose parts are not published",
        eight_bits=True,
    ),
)
