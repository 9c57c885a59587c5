"""Variants of attention and norms against a plain torch model in float64, with gradients, and over ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny import LLAMA, SEQ, VOCAB, run_step
from torch import Tensor

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.models.gpt import GPTModel
from megapipe.partition.spans import LayerSpan
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build
from megapipe.tensor_parallel.rng import initialize

PLAIN = replace(LLAMA, position_embedding_type="none", norm_epsilon=1e-5)
SANDWICH = replace(PLAIN, norm_placement="sandwich")
VARIANTS: dict[str, ModelConfig] = {
    "pre": PLAIN,
    "post": replace(PLAIN, norm_placement="post"),
    "sandwich, 1 + w": replace(SANDWICH, apply_layernorm_1p=True),
    "scale": replace(PLAIN, softmax_scale=0.8),
    "capped scores": replace(PLAIN, attn_logit_softcapping=0.02),
    "capped scores in windows": replace(PLAIN, attn_logit_softcapping=0.02, window_size="3,0"),
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
    q, k, v = rows.split([per_group, 1, 1], dim=3)
    scores = torch.einsum("bqgnd,bkgd->bgnqk", q, k.squeeze(3)) * (config.softmax_scale or d**-0.5)
    if config.attn_logit_softcapping:
        scores = torch.tanh(scores / config.attn_logit_softcapping) * config.attn_logit_softcapping
    far = s if config.window is None else config.window
    seen = torch.ones(s, s).tril().triu(-far).bool()
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.einsum("bgnqk,bkgd->bqgnd", p, v.squeeze(3)).flatten(2)
    return out @ weights[f"{name}.linear_proj.weight"].t()


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
    want = loss_of(config, copies, inputs, labels)
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    for key, param in model.named_parameters():
        torch.testing.assert_close(param.grad, copies[key].grad, rtol=1e-9, atol=1e-11, msg=key)
    # The norms that there are decide a placement; any other feature is a setting that moves the loss.
    if name not in ("pre", "post", "sandwich, 1 + w"):
        plain = loss_of(PLAIN, copies, inputs, labels)
        assert abs(plain - want) > 1e-3 * abs(want)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "pre"])
def test_two_stages_of_two_ranks_have_the_gradients_of_one_process(name):
    config = replace(VARIANTS[name], sequence_parallel="capped" not in name)
    alone = replace(config, sequence_parallel=False)
    one = run_threads(lambda mesh: run_step(mesh, alone, build("1f1b", 1, 4)), pp=1)
    four = run_threads(lambda mesh: run_step(mesh, config, build("zb-h1", 2, 4)), pp=2, tp=2)
    assert_same(one[0], four)


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
