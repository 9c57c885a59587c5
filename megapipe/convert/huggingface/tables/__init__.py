"""The families of Hugging Face models that can be converted, each a table."""

from __future__ import annotations

from megapipe.convert.huggingface.family import Family
from megapipe.convert.huggingface.tables import (
    deepseek,
    dense,
    gpt,
    layernorm,
    llama,
    placed,
    qwen,
    sigmoid,
)

# By model_type of config.json. An export takes the first family that can express the model, so the
# well-known ones stand first.
FAMILIES: dict[str, Family] = {
    "gpt2": gpt.GPT2,
    "llama": llama.LLAMA,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "mistral": llama.MISTRAL,
    "mixtral": qwen.MIXTRAL,
    "qwen2_moe": qwen.QWEN2_MOE,
    "qwen3_moe": qwen.QWEN3_MOE,
    "deepseek_v2": deepseek.V2,
    "deepseek_v3": deepseek.V3,
    "smollm3": dense.SMOLLM3,
    "seed_oss": dense.SEED_OSS,
    "internlm3": dense.INTERNLM3,
    "iquestcoder": dense.IQUESTCODER,
    "cwm": dense.CWM,
    "ministral": dense.MINISTRAL,
    "arcee": dense.ARCEE,
    "helium": dense.HELIUM,
    "ernie4_5": dense.ERNIE4_5,
    "phi3": dense.PHI3,
    "glm": dense.GLM,
    "glm4": placed.GLM4,
    "exaone4": placed.EXAONE4,
    "olmo2": placed.OLMO2,
    "olmo3": placed.OLMO3,
    "olmoe": placed.OLMOE,
    "flex_olmo": placed.FLEX_OLMO,
    "ministral3": dense.MINISTRAL3,
    "starcoder2": layernorm.STARCODER2,
    "nemotron": layernorm.NEMOTRON,
    "stablelm": layernorm.STABLELM,
    "jais2": layernorm.JAIS2,
    "gpt_neox": layernorm.GPT_NEOX,
    "persimmon": layernorm.PERSIMMON,
    "gpt_bigcode": layernorm.GPT_BIGCODE,
    "glm4_moe": sigmoid.GLM4_MOE,
    "solar_open": sigmoid.SOLAR_OPEN,
    "dots1": sigmoid.DOTS1,
    "exaone_moe": sigmoid.EXAONE_MOE,
    "hy_v3": sigmoid.HY_V3,
    "minimax_m2": sigmoid.MINIMAX_M2,
    "youtu": deepseek.YOUTU,
    "kimi_k2": deepseek.KIMI_K2,
}
