"""The model's parts against formulas written out, and its settings one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny import GPT2, LLAMA, SEQ, VOCAB

from megapipe.distributed.axis import Axis
from megapipe.models.attention.layer import SelfAttention
from megapipe.models.attention.rope import Rotary, rotate
from megapipe.models.gpt import GPTModel
from megapipe.models.mlp import MLP
from megapipe.models.norm import Norm
from megapipe.partition.spans import LayerSpan
from megapipe.tensor_parallel.rng import initialize


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def built(module: torch.nn.Module) -> torch.nn.Module:
    initialize(module, 1, Axis())
    return module.double().eval()


def whole(config) -> GPTModel:
    return built(GPTModel(config, LayerSpan(0, config.layers, True, True), Axis()))


def test_rope_is_a_rotation_in_the_complex_plane():
    x = random(6, 2, 3, 8)
    angle = torch.arange(6).double().outer(10000.0 ** (-torch.arange(4).double() / 4))
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)[:, None, None, :]
    torch.testing.assert_close(rotate(x, Rotary(8)), torch.cat((turned.real, turned.imag), -1))


def test_rope_of_a_part_of_the_head_leaves_the_rest():
    x = random(6, 2, 3, 8)
    y = rotate(x, Rotary(4))
    assert torch.equal(y[..., 4:], x[..., 4:])
    torch.testing.assert_close(y[..., :4], rotate(x[..., :4].contiguous(), Rotary(4)))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_equals_softmax_over_the_past_written_out(groups):
    config = replace(LLAMA, num_query_groups=groups, position_embedding_type="none")
    layer, x = built(SelfAttention(config, Axis(), 0)), random(SEQ, 2, 32)
    rows = (x @ layer.linear_qkv.weight.t()).view(SEQ, 2, groups, 4 // groups + 2, 8)
    out = torch.zeros(SEQ, 2, 4, 8, dtype=torch.float64)
    for head in range(4):
        group, query = divmod(head, 4 // groups)
        q, k, v = rows[:, :, group, query], rows[:, :, group, -2], rows[:, :, group, -1]
        scores = torch.einsum("qbd,kbd->bqk", q, k) / 8**0.5
        scores = scores.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), float("-inf"))
        out[:, :, head] = torch.einsum("bqk,kbd->qbd", scores.softmax(-1), v)
    torch.testing.assert_close(layer(x), out.flatten(2) @ layer.linear_proj.weight.t())


def test_attention_with_dropout_of_almost_nothing_equals_attention_without():
    layer = built(SelfAttention(replace(LLAMA, attention_dropout=1e-12), Axis(), 0))
    x = random(SEQ, 2, 32)
    torch.testing.assert_close(layer.train()(x), layer.eval()(x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_equal_their_formulas(kind):
    norm, x = built(Norm(replace(GPT2, normalization=kind), 32)), random(5, 32)
    centred = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    torch.testing.assert_close(norm(x), centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt())


def test_swiglu_is_silu_of_gate_times_up():
    mlp, x = built(MLP(LLAMA, Axis())), random(5, 2, 32)
    gate, up = (x @ mlp.linear_fc1.weight.t()).chunk(2, -1)
    torch.testing.assert_close(mlp(x), (F.silu(gate) * up) @ mlp.linear_fc2.weight.t())


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_a_token_does_not_see_what_follows_it(config):
    model = whole(config)
    tokens = torch.randint(0, VOCAB, (1, SEQ))
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_qkv_bias_can_be_the_only_bias():
    names = dict(whole(replace(LLAMA, add_qkv_bias=True)).named_parameters())
    assert [n for n in names if n.endswith("bias")] == [
        f"decoder.layers.{n}.self_attention.linear_qkv.bias" for n in range(4)
    ]


def test_query_and_key_heads_are_normed_when_asked():
    config = replace(LLAMA, qk_layernorm=True, norm_epsilon=1e-20, position_embedding_type="none")
    layer, x = built(SelfAttention(config, Axis(), 0)), random(SEQ, 1, 32)
    # a norm undoes any scale of the queries and keys
    scaled = built(SelfAttention(config, Axis(), 0))
    with torch.no_grad():
        rows = scaled.linear_qkv.weight.view(2, 4, 8, 32)
        rows[:, :3] *= 7.0
    torch.testing.assert_close(layer(x), scaled(x))


def test_two_spans_together_are_the_whole_model():
    tokens = torch.randint(0, VOCAB, (2, SEQ))
    first = built(GPTModel(LLAMA, LayerSpan(0, 3, True, False), Axis()))
    last = built(GPTModel(LLAMA, LayerSpan(3, 1, False, True), Axis()))
    last.set_input_tensor(first(tokens))
    assert torch.equal(last(), whole(LLAMA)(tokens))
    names = [*dict(first.named_parameters()), *dict(last.named_parameters())]
    assert sorted(names) == sorted(dict(whole(LLAMA).named_parameters()))


def test_swiglu_width_defaults_to_two_thirds_of_four_hidden_in_steps_of_64():
    assert replace(LLAMA, hidden_size=768, ffn_hidden_size=None).ffn == 2048
    assert replace(GPT2, hidden_size=768).ffn == 3072


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_the_fused_loss_gives_the_losses_and_gradients_of_head_and_loss_apart(config):
    tokens = torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(3))
    results = []
    for fusion in (False, True):
        model = whole(replace(config, cross_entropy_loss_fusion=fusion))
        losses = model(tokens[:, :-1], labels=tokens[:, 1:])
        losses.square().sum().backward()
        results.append([losses.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[0], results[1])
