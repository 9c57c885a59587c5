"""Small random models of the transformers library, and what they say: what the conversion tests share."""

from __future__ import annotations

import importlib
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.convert.tensors import SavedTensors, load_full, whole_model
from megapipe.distributed.axis import Axis
from megapipe.errors import CheckpointError

if find_spec("transformers") is None:
    pytest.skip("the transformers library is not installed", allow_module_level=True)


class _Transformers:
    """The library, imported when a test asks it for something: it takes two seconds, and every worker collects."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # pytest asks each name of a file whether it is a mock
        return getattr(importlib.import_module("transformers"), name)


transformers: Any = _Transformers()

TOKENS = torch.randint(0, 101, (2, 10), generator=torch.Generator().manual_seed(3))
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
YARN |= {"mscale": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rotary(draw: random.Random) -> dict[str, Any]:
    """A size that Llama, Qwen2, Qwen3 and Mistral understand; two layers and tensor-parallel ranks must be possible."""
    heads = draw.choice([2, 4, 6])
    rope = {"rope_type": "default"} if draw.random() < 0.5 else LLAMA3 | {"original_max_position_embeddings": 8192}
    return {
        "hidden_size": heads * draw.choice([8, 10]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([2, heads]),
        "num_hidden_layers": draw.choice([2, 4]),
        "intermediate_size": draw.choice([24, 40]),
        "max_position_embeddings": 24,
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": rope | {"rope_theta": draw.choice([1e4, 5e5])},
        "vocab_size": 101,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def gpt2(draw: random.Random) -> Any:
    heads = draw.choice([2, 4, 6])
    return transformers.GPT2Config(
        n_embd=8 * heads,
        n_head=heads,
        n_layer=draw.choice([2, 4]),
        n_inner=draw.choice([None, 24]),
        n_positions=24,
        vocab_size=101,
        activation_function=draw.choice(["gelu_new", "gelu"]),
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )


def llama(draw: random.Random) -> Any:
    bias = draw.random() < 0.5
    return transformers.LlamaConfig(**rotary(draw), attention_bias=bias, mlp_bias=bias)


def qwen2(draw: random.Random) -> Any:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0} if draw.random() < 0.5 else {}
    return transformers.Qwen2Config(**rotary(draw), **window)


def qwen3(draw: random.Random) -> Any:
    return transformers.Qwen3Config(**rotary(draw), head_dim=draw.choice([6, 12]))


def mistral(draw: random.Random) -> Any:
    return transformers.MistralConfig(**rotary(draw), sliding_window=draw.choice([None, 4]))


def mixtral(draw: random.Random) -> Any:
    chosen = {"num_local_experts": 6, "num_experts_per_tok": draw.choice([2, 3])}
    return transformers.MixtralConfig(**rotary(draw), sliding_window=None, **chosen)


def sparse(draw: random.Random) -> dict[str, Any]:
    """What the mixtures of experts of Qwen2 and Qwen3 say beside the rest; a layer may be dense."""
    return {
        "num_experts": 6,
        "num_experts_per_tok": draw.choice([2, 3]),
        "moe_intermediate_size": draw.choice([12, 16]),
        "norm_topk_prob": draw.random() < 0.5,
        "mlp_only_layers": draw.choice([[], [0]]),
        "use_sliding_window": False,
    }


def delta(draw: random.Random) -> dict[str, Any]:
    """What Qwen3-Next and Qwen3.5 say of gated delta nets, with one value head for a key head or two.

    The norm of a few small values makes rounding larger: with an epsilon of 1e-6 transformers' own float32 logits are
    up to 2e-5 of the largest away from float64's.
    """
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": draw.choice([0.25, 0.5])}
    return {
        "rms_norm_eps": draw.choice([1e-2, 3e-2]),
        "num_hidden_layers": 4,
        "head_dim": draw.choice([8, 16]),
        "attention_bias": draw.random() < 0.5,
        "rope_parameters": rope,
        "layer_types": draw.choice([None, ["full_attention", "linear_attention"] * 2]),
        "linear_conv_kernel_dim": draw.choice([2, 4]),
        "linear_key_head_dim": draw.choice([4, 6]),
        "linear_value_head_dim": draw.choice([6, 8]),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": draw.choice([2, 4]),
    }


def qwen2_moe(draw: random.Random) -> Any:
    return transformers.Qwen2MoeConfig(**rotary(draw), **sparse(draw), shared_expert_intermediate_size=20)


def qwen3_moe(draw: random.Random) -> Any:
    return transformers.Qwen3MoeConfig(**rotary(draw), **sparse(draw), head_dim=draw.choice([6, 12]))


def latent(draw: random.Random) -> dict[str, Any]:
    """What both DeepSeeks say; the norms of latents have an epsilon of 1e-6 whatever is said."""
    rope = {"rope_type": "default"}
    if draw.random() < 0.5:
        rope = YARN | {"mscale_all_dim": draw.choice([0.5, 1.0])}
    base = {key: value for key, value in rotary(draw).items() if key != "num_key_value_heads"}
    return base | {
        "rope_parameters": rope | {"rope_theta": 1e4},
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": base["num_attention_heads"],
        "q_lora_rank": draw.choice([None, 12]),
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": draw.choice([6, 16]),
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": draw.choice([2, 3]),
        "n_shared_experts": draw.choice([1, 2]),
        "moe_intermediate_size": 12,
        "first_k_dense_replace": draw.choice([0, 1]),
        "routed_scaling_factor": 2.5,
    }


def deepseek_v2(draw: random.Random) -> Any:
    """Without a latent of queries the choice is not limited, as in V2-Lite; both are stretched."""
    said = latent(draw)
    rope = YARN | {"rope_theta": 1e4, "mscale": 0.707, "mscale_all_dim": 0.707}
    method = "group_limited_greedy" if said["q_lora_rank"] else "greedy"
    return transformers.DeepseekV2Config(**said | {"rope_parameters": rope}, topk_method=method)


def deepseek_v3(draw: random.Random) -> Any:
    return transformers.DeepseekV3Config(**latent(draw))


FAMILIES = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
}


def saved(family: str, seed: int, folder: Path, **kwargs: Any) -> Tensor:
    """Save a drawn model of a family; return its logits [2, s, v]."""
    save(FAMILIES[family](random.Random(f"{family}{seed}")), folder, seed, **kwargs)
    return theirs(folder)


def save(config: Any, folder: Path, seed: int = 3, **kwargs: Any) -> None:
    """Save a model with every parameter, every bias of a router and every layer's scalar at random."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    floating = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    biases = [buffer for name, buffer in floating.items() if "bias" in name or "layer_scalar" in name]
    with torch.no_grad():
        for tensor in (*model.parameters(), *biases):
            tensor += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(folder, **kwargs)


def theirs(folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        return model(TOKENS).logits


def ours(folder: Path, model: ModelConfig, words: int = 101) -> Tensor:
    """Return the logits [2, s, words] of a checkpoint of ours on one rank, as this model."""
    module = whole_model(model)
    load_full([module], SavedTensors(folder).read, Axis())
    with torch.no_grad():
        return module.float().eval()(TOKENS)[..., :words]


def refused(work) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        work()
    return caught.value.problems
