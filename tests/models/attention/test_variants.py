"""Variants of attention and norms against a plain torch model in float64, with gradients, and over ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny import LLAMA, SEQ, VOCAB, WAITING, run_step
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.models.gpt import GPTModel
from megapipe.partition.spans import LayerSpan
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build
from megapipe.tensor_parallel.rng import initialize
from tools.proofs.equivalence_case import Case
from tools.proofs.fuzz_equivalence import run

PLAIN = replace(LLAMA, position_embedding_type="none", norm_epsilon=1e-5)
YARN = replace(LLAMA, position_embedding_type="yarn", rotary_base=20.0, rotary_scaling_factor=4.0, mscale=2.0)
YARN = replace(YARN, yarn_original_max_position_embeddings=6, yarn_beta_fast=0.8, yarn_beta_slow=0.3)
LONG = replace(LLAMA, position_embedding_type="longrope", longrope_original_max_position_embeddings=SEQ)
LONG = replace(LONG, longrope_short_factor=(1.0, 1.5, 2.0, 4.0), longrope_long_factor=(2.0, 3.0, 5.0, 9.0))
LONG = replace(LONG, longrope_attention_factor=1.3, softmax_scale=2.0)
SANDWICH = replace(PLAIN, norm_placement="sandwich")
VARIANTS: dict[str, ModelConfig] = {
    "pre": PLAIN,
    "post": replace(PLAIN, norm_placement="post"),
    "sandwich, 1 + w": replace(SANDWICH, apply_layernorm_1p=True),
    "scale": replace(PLAIN, softmax_scale=0.8),
    "capped scores": replace(PLAIN, attn_logit_softcapping=0.02),
    "capped scores in windows": replace(PLAIN, attn_logit_softcapping=0.02, window_size="3,0"),
    "norms of all heads": replace(PLAIN, qk_layernorm=True, qk_layernorm_all_heads=True),
    "heads of length 1": replace(PLAIN, qk_l2_norm=True),
    "values of length 1": replace(PLAIN, v_l2_norm=True),
    "values from keys": replace(LLAMA, keys_as_values=True, v_l2_norm=True, qk_l2_norm=True),
    "values from keys, gate": replace(PLAIN, keys_as_values=True, attention_output_gate=True, softmax_scale=0.8),
    "a quarter of the pairs": replace(LLAMA, rotary_percent=0.25, rotary_proportional=True),
    "layers with a scalar": replace(PLAIN, layer_scalar=True),
    "chunks": replace(PLAIN, attention_chunk_size=3),
    "chunks and windows": replace(LLAMA, attention_chunk_size=4, window_size="2,0", qk_l2_norm=True),
    "queries that grow": replace(PLAIN, attention_temperature_beta=2.0, attention_temperature_length=3),
    "scaled, no pairs between": replace(
        LLAMA, rotary_base=1e6, use_rope_scaling=True, rope_scaling_high_freq_factor=1.0
    ),
    "scaled, many pairs between": replace(LLAMA, use_rope_scaling=True, rope_scaling_high_freq_factor=1e3),
    "off by one": replace(PLAIN, softmax_type="off-by-one"),
    "sinks": replace(PLAIN, softmax_type="learnable"),
    "sinks in windows": replace(PLAIN, softmax_type="learnable", window_size="3,0"),
    "gate": replace(PLAIN, attention_output_gate=True),
    "yarn": replace(YARN, norm_placement="post"),
    "yarn, ends of its range not rounded": replace(YARN, no_yarn_correction_range_round_to_int=True),
    "temperature": replace(YARN, yarn_temperature_beta=2.0),
    "interpolated": replace(LLAMA, rotary_seq_len_interpolation_factor=4.0, softmax_scale=2.0),
    "longrope, short": LONG,
    "longrope, long": replace(LONG, longrope_original_max_position_embeddings=SEQ - 1),
    "capped logits": replace(PLAIN, final_logit_softcapping=0.3),
    "capped logits, fused loss": replace(PLAIN, final_logit_softcapping=0.3, cross_entropy_loss_fusion=True),
}


def normed(x: Tensor, weights: dict[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    weight = weights.get(f"{name}.weight")
    if weight is None:
        return x
    weight = weight + 1 if config.apply_layernorm_1p else weight
    return x * (x.square().mean(-1, keepdim=True) + config.norm_epsilon).rsqrt() * weight


def attention(x: Tensor, weights: dict[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    """Attention written out over [b, s, h], with the rows of QKV by group."""
    b, s, _ = x.shape
    groups, d = config.query_groups, config.head_dim
    per_group = config.heads // groups
    rows = (x @ weights[f"{name}.linear_qkv.weight"].t()).view(b, s, groups, -1, d)
    gated = config.attention_output_gate
    q, gate, k, *v = rows.split([per_group, per_group * gated, *[1] * (2 - config.keys_as_values)], dim=3)
    v = v[0] if v else k
    if config.v_l2_norm:
        v = v / (v.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
    if config.qk_l2_norm:
        q, k = (x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() for x in (q, k))
    if config.qk_layernorm_all_heads:
        q = normed(q.flatten(2), weights, f"{name}.q_layernorm", config).view(q.shape)
        k = normed(k.flatten(2), weights, f"{name}.k_layernorm", config).view(k.shape)
    if config.rotates:
        q, k = (rotated(x, config) for x in (q, k))
        ages = torch.arange(s).double().div(config.yarn_original_max_position_embeddings).floor()
        q = q * (1 + config.yarn_temperature_beta * torch.log(1 + ages)).view(1, s, 1, 1, 1)
    elif config.attention_temperature_beta:
        ages = torch.arange(1, s + 1).double().div(config.attention_temperature_length).floor()
        q = q * (1 + config.attention_temperature_beta * torch.log(1 + ages)).view(1, s, 1, 1, 1)
    scores = torch.einsum("bqgnd,bkgd->bgnqk", q, k.squeeze(3)) * (config.softmax_scale or d**-0.5)
    if config.attn_logit_softcapping:
        scores = torch.tanh(scores / config.attn_logit_softcapping) * config.attn_logit_softcapping
    far = s if config.window is None else config.window
    seen = torch.ones(s, s).tril().triu(-far).bool()
    chunk = torch.arange(s) // (config.attention_chunk_size or s)
    seen = seen & (chunk[:, None] == chunk)
    scores = scores.masked_fill(~seen, -torch.inf)
    if config.softmax_type != "vanilla":
        offset = weights.get(f"{name}.softmax_offset", torch.zeros(config.heads).double())
        sinks = offset.view(1, groups, per_group, 1, 1).expand(b, -1, -1, s, 1)
        scores = torch.cat((scores, sinks), -1)
    p = scores.softmax(-1)[..., :s]
    out = torch.einsum("bgnqk,bkgd->bqgnd", p, v.squeeze(3))
    if gated:
        out = out * torch.sigmoid(gate)
    out = out.flatten(2)
    return out @ weights[f"{name}.linear_proj.weight"].t()


def rotated(x: Tensor, config: ModelConfig) -> Tensor:
    """Heads [b, s, ..., d] rotated by complex numbers, with yarn's frequencies as its paper has them (appendix A)."""
    d, base, s = x.shape[-1], config.rotary_base, x.shape[1]
    frequencies = [base ** (-2 * i / d) / config.rotary_seq_len_interpolation_factor for i in range(d // 2)]
    if config.rotary_proportional:
        kept = int(config.rotary_percent * d / 2)
        frequencies = [f if i < kept else 0.0 for i, f in enumerate(frequencies)]
    length = 1.0
    if config.position_embedding_type == "yarn":
        original, factor = config.yarn_original_max_position_embeddings, config.rotary_scaling_factor
        turns = (config.yarn_beta_fast, config.yarn_beta_slow)
        low, high = (d * math.log(original / (n * 2 * math.pi)) / (2 * math.log(base)) for n in turns)
        if not config.no_yarn_correction_range_round_to_int:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        slow = [min(max((i - low) / (high - low), 0), 1) for i in range(d // 2)]
        frequencies = [f / factor * share + f * (1 - share) for f, share in zip(frequencies, slow, strict=True)]
        length = 0.1 * config.mscale * math.log(factor) + 1
    if config.use_rope_scaling:
        # Dubey et al. 2024: pairs that turn slowly in 8192 tokens have a frequency of an eighth.
        turns_of = [8192 * f / (2 * math.pi) for f in frequencies]
        high = config.rope_scaling_high_freq_factor
        kept = [min(max((n - 1) / max(high - 1, 1e-9), 0), 1) for n in turns_of]
        frequencies = [f * share + f / 8 * (1 - share) for f, share in zip(frequencies, kept, strict=True)]
    if config.position_embedding_type == "longrope":
        is_short = s <= config.longrope_original_max_position_embeddings
        divisors = config.longrope_short_factor if is_short else config.longrope_long_factor
        frequencies = [f / by for f, by in zip(frequencies, divisors, strict=True)]
        length = config.longrope_attention_factor
    angle = (
        torch.arange(s)
        .double()
        .outer(torch.tensor(frequencies, dtype=torch.float64))
        .view(1, s, *[1] * (x.ndim - 3), -1)
    )
    pairs = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.polar(torch.full_like(angle, length), angle)
    return torch.cat((pairs.real, pairs.imag), -1)


def loss_of(config: ModelConfig, weights: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses, by operations of torch alone."""
    x = weights["embedding.word_embeddings.weight"][tokens]
    for n in range(config.layers):
        layer = f"decoder.layers.{n}"
        y = attention(
            normed(x, weights, f"{layer}.input_layernorm", config), weights, f"{layer}.self_attention", config
        )
        x = x + normed(y, weights, f"{layer}.post_self_attn_layernorm", config)
        y = normed(x, weights, f"{layer}.pre_mlp_layernorm", config)
        gate, up = (y @ weights[f"{layer}.mlp.linear_fc1.weight"].t()).chunk(2, -1)
        y = (F.silu(gate) * up) @ weights[f"{layer}.mlp.linear_fc2.weight"].t()
        x = x + normed(y, weights, f"{layer}.post_mlp_layernorm", config)
        x = x * weights.get(f"{layer}.layer_scalar", 1.0)
    logits = normed(x, weights, "decoder.final_layernorm", config) @ weights["output_layer.weight"].t()
    if config.final_logit_softcapping:
        logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def drawn(config: ModelConfig) -> GPTModel:
    """A model whose weights are large enough for each feature to move the loss."""
    model = GPTModel(config, LayerSpan(0, config.layers, True, True), Axis())
    initialize(model, 1, Axis())
    torch.manual_seed(2)
    model.double()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.2 * torch.randn_like(param)
        for buffer in model.buffers():
            buffer += 0.5
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_gradients_are_those_of_plain_torch(name):
    config = VARIANTS[name]
    model = drawn(config)
    tokens = torch.randint(0, VOCAB, (2, SEQ + 1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    loss = model(inputs, labels=labels).sum()
    loss.backward()
    copies = {key: x.detach().clone().requires_grad_() for key, x in model.named_parameters()}
    want = loss_of(config, copies | dict(model.named_buffers()), inputs, labels)
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    for key, param in model.named_parameters():
        torch.testing.assert_close(param.grad, copies[key].grad, rtol=1e-9, atol=1e-11, msg=key)
    # The norms that there are decide a placement; any other feature is a setting that moves the loss.
    if name not in ("pre", "post", "sandwich, 1 + w"):
        plain = replace(LLAMA if config.rotates else PLAIN, attention_output_gate=config.attention_output_gate)
        plain = replace(plain, keys_as_values=config.keys_as_values)
        if name == "gate":
            copies = {key: torch.zeros_like(x) if "linear_proj" in key else x for key, x in copies.items()}
        plain = loss_of(plain, copies, inputs, labels)
        assert abs(plain - want) > 1e-3 * abs(want)


OF_STAGES = ("post", "layers with a scalar", "capped logits", "capped logits, fused loss")


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "pre"])
def test_two_ranks_of_a_stage_or_of_each_of_two_have_the_gradients_of_one_process(name):
    """Two stages where an end of the model, or the layer before, differs: attention does not see where it stands."""
    config = replace(VARIANTS[name], sequence_parallel="capped" not in name)
    alone = replace(config, sequence_parallel=False)
    schedule = build("zb-h1", 2, 2) if name in OF_STAGES else WAITING
    pp = schedule.placement.num_ranks
    one = run_threads(lambda mesh: run_step(mesh, alone, build("1f1b", 1, 2)), pp=1)
    ranks = run_threads(lambda mesh: run_step(mesh, config, schedule), pp=pp, tp=2)
    assert_same(one[0], ranks)


def assert_same(one, ranks) -> None:
    losses, gradients = one
    for rank in ranks:
        if rank[0]:
            torch.testing.assert_close(rank[0], losses, rtol=1e-11, atol=0)
    for name, (want, _, _) in gradients.items():
        parts = [rank[1][name] for rank in ranks if name in rank[1]]
        _, dim, full = parts[0]
        tensors = [part.view([-1 if i == dim else n for i, n in enumerate(full)]) for part, _, _ in parts]
        whole = torch.cat(tensors, dim) if dim is not None else tensors[0]
        torch.testing.assert_close(whole.view_as(want), want, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("style, way", [("sinks", "p2p"), ("sinks", "a2a"), ("gemma2", "p2p"), ("olmo3", "all_gather")])
def test_context_parallel_ranks_train_as_one_process(style, way):
    """Also with heads that are dealt to ranks, whose sinks are parts, and with attention that is computed again."""
    tp = 2 if way == "p2p" else 1
    recompute = "selective" if way == "a2a" else "none"
    case = Case("1f1b", 1, 2, (2,), cp=2, tp=tp, way=way, style=style, recompute=recompute, steps=2)
    assert run(replace(case, sequence_parallel=tp > 1, documents="both" if tp > 1 else "none")) == []
