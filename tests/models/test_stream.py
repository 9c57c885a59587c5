"""Factors, parallel halves and biases by matrix: a model beside plain torch in float64, with all its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny import GPT2, SEQ, VOCAB

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.models.gpt import GPTModel
from megapipe.partition.spans import LayerSpan
from megapipe.plan.pieces import pieces
from megapipe.tensor_parallel.rng import initialize

MODEL = replace(GPT2, num_layers=2, attention_dropout=0.0, hidden_dropout=0.0)
BARE = replace(MODEL, disable_bias_linear=True)
FACTORS = {"mup_embedding_mult": 3.0, "residual_multiplier": 0.5, "mup_output_mult": 0.7}
CASES: dict[str, ModelConfig] = {
    "factors": replace(MODEL, **FACTORS),
    "one norm": replace(MODEL, parallel_attention_mlp="one_norm"),
    "one norm, recomputed": replace(
        MODEL,
        parallel_attention_mlp="one_norm",
        recompute_granularity="selective",
        recompute_modules=("layernorm", "mlp"),
    ),
    "two norms and factors": replace(MODEL, parallel_attention_mlp="two_norms", **FACTORS),
    "two norms, recomputed": replace(
        MODEL,
        parallel_attention_mlp="two_norms",
        recompute_granularity="selective",
        recompute_modules=("layernorm",),
    ),
    "norms without bias": replace(MODEL, no_norm_bias=True),
    "norms without bias, minus one": replace(MODEL, no_norm_bias=True, apply_layernorm_1p=True),
    "biases of attention": replace(BARE, add_qkv_bias=True, add_bias_to=("proj",)),
    "biases of the MLP": replace(BARE, add_bias_to=("fc1", "fc2")),
    "a bias of the head": replace(MODEL, add_bias_to=("head",), untie_embeddings_and_output_weights=True),
}
TOKENS = torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(2))


def built(model: ModelConfig) -> GPTModel:
    module = GPTModel(model, LayerSpan(0, model.layers, True, True), Axis())
    initialize(module, 1, Axis())
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(torch.randn(param.shape, generator=draw), alpha=0.1)
    return module.double()


def plain(model: ModelConfig, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss, from weights by name."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = w[f"{name}.weight"] + int(model.apply_layernorm_1p)
        return F.layer_norm(x, (32,), weight, w.get(f"{name}.bias"), model.norm_epsilon)

    def attention(x: torch.Tensor, at: str) -> torch.Tensor:
        q, k, v = linear(x, f"{at}.linear_qkv").view(2, SEQ, 4, 3, 8).permute(3, 0, 2, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return model.residual_multiplier * linear(out.transpose(1, 2).flatten(2), f"{at}.linear_proj")

    def mlp(x: torch.Tensor, at: str) -> torch.Tensor:
        between = F.gelu(linear(x, f"{at}.linear_fc1"), approximate="none" if model.erf_gelu else "tanh")
        return model.residual_multiplier * linear(between, f"{at}.linear_fc2")

    x = w["embedding.word_embeddings.weight"][TOKENS[:, :-1]] + w["embedding.position_embeddings.weight"][:SEQ]
    x = x * model.mup_embedding_mult
    for n in range(2):
        at = f"decoder.layers.{n}"
        normed = norm(x, f"{at}.input_layernorm")
        if model.parallel_attention_mlp is None:
            x = x + attention(normed, f"{at}.self_attention")
            x = x + mlp(norm(x, f"{at}.pre_mlp_layernorm"), f"{at}.mlp")
        elif model.parallel_attention_mlp == "one_norm":
            x = x + attention(normed, f"{at}.self_attention") + mlp(normed, f"{at}.mlp")
        else:
            second = norm(x, f"{at}.pre_mlp_layernorm")
            x = x + attention(normed, f"{at}.self_attention") + mlp(second, f"{at}.mlp")
    logits = linear(norm(x, "decoder.final_layernorm") * model.mup_output_mult, "output_layer")
    return F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_plain_torch(case):
    model = CASES[case]
    module = built(model)
    loss = module(TOKENS[:, :-1], labels=TOKENS[:, 1:]).mean()
    loss.backward()
    got = {name: param.grad for name, param in module.named_parameters()}
    its = {name: param.detach().clone().requires_grad_() for name, param in module.named_parameters()}
    want = plain(model, its)
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    for name, param in its.items():
        torch.testing.assert_close(got[name], param.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_the_plan_counts_the_parameters_there_are(case):
    model = CASES[case]
    parts = pieces(model, SEQ)
    counted = sum(part.parameters for part in (parts.embedding, *parts.layers, parts.head))
    assert counted == sum(param.numel() for param in built(model).parameters())
