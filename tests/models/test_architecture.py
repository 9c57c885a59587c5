"""The flags of the architecture one by one: each against its formula written out, or an equality it must cause."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny import GPT2, LLAMA, SEQ, VOCAB

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.tokens import WHOLE, Documents, find_documents, positions
from megapipe.models.attention.layer import SelfAttention
from megapipe.models.attention.rope import Rotary, rotate
from megapipe.models.gpt import GPTModel
from megapipe.models.layer import compile_layers
from megapipe.models.mlp import MLP
from megapipe.models.norm import Norm
from megapipe.partition.spans import LayerSpan
from megapipe.tensor_parallel.rng import MicrobatchContext, initialize

EOD = 3


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def built(module: torch.nn.Module) -> torch.nn.Module:
    initialize(module, 1, Axis())
    return module.double().eval()


def whole(config: ModelConfig) -> GPTModel:
    return built(GPTModel(config, LayerSpan(0, config.layers, True, True), Axis()))


def attend(layer: SelfAttention, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention without positions, by formula, where `seen` [b or 1, s, s] is True. For four heads in two groups."""
    s, b, _ = x.shape
    rows = (x @ layer.linear_qkv.weight.t()).view(s, b, 2, 4, 8)
    q, k, v = rows[:, :, :, :2], rows[:, :, :, 2], rows[:, :, :, 3]
    scores = torch.einsum("qbgnd,kbgd->bgnqk", q, k) / math.sqrt(8)
    scores = scores.masked_fill(~seen[:, None, None], -math.inf)
    return torch.einsum("bgnqk,kbgd->qbgnd", scores.softmax(-1), v).flatten(2) @ layer.linear_proj.weight.t()


def past(s: int) -> torch.Tensor:
    return torch.ones(1, s, s).tril().bool()


def test_interleaved_rope_turns_neighbouring_channels():
    x = random(6, 2, 3, 8)
    angle = torch.arange(6).double().outer(10000.0 ** (-torch.arange(4).double() / 4))
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None, None]
    want = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(rotate(x, Rotary(8, interleaved=True)), want)


def test_scaled_rope_slows_only_long_waves():
    plain, scaled = (Rotary(128, 500000.0, scaling=f).frequencies() for f in (None, 8.0))
    waves = 2 * math.pi / plain
    assert torch.equal(scaled[waves < 2048], plain[waves < 2048])
    torch.testing.assert_close(scaled[waves > 8192], plain[waves > 8192] / 8)
    between = (waves > 2048) & (waves < 8192)
    smooth = (8192 / waves[between] - 1) / 3  # Llama 3.1's linear blend, low 1 and high 4
    torch.testing.assert_close(scaled[between], plain[between] * (smooth + (1 - smooth) / 8))


def test_rope_flags_reach_the_model():
    tokens, llama = torch.randint(0, VOCAB, (2, SEQ)), replace(LLAMA, rotary_base=1e6)
    plain = whole(llama)(tokens)
    for changed in ({"rotary_interleaved": True}, {"use_rope_scaling": True}, {"rotary_percent": 0.5}):
        assert not torch.equal(whole(replace(llama, **changed))(tokens), plain)
    scaled = whole(replace(llama, use_rope_scaling=True, rope_scaling_factor=32.0))(tokens)
    assert not torch.equal(scaled, whole(replace(llama, use_rope_scaling=True))(tokens))


@pytest.mark.parametrize("window, s", [(3, 12), (0, 12), (150, 500), (11, 12), (130, 129)])
def test_a_window_equals_its_mask_written_out(window, s):
    config = replace(LLAMA, window_size=f"{window},0", position_embedding_type="none")
    layer, x = built(SelfAttention(config, Axis(), 0)), random(s, 2, 32)
    torch.testing.assert_close(layer(x), attend(layer, x, past(s).triu(-window)))


def test_a_window_without_limit_is_none():
    assert ModelConfig(window_size="-1,0").window is None
    assert ModelConfig(window_size="(128,0)").window == 128


@pytest.mark.parametrize("window", [None, "2,0"])
def test_attention_inside_documents_equals_its_mask_written_out(window):
    config = replace(LLAMA, window_size=window, position_embedding_type="none")
    layer, x = built(SelfAttention(config, Axis(), 0)), random(SEQ, 2, 32)
    lengths = ((5, 1, 6), (12,))
    number = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])
    seen = past(SEQ).triu(-2 if window else -SEQ) & (number[:, :, None] == number[:, None])
    want = attend(layer, x, seen)
    with MicrobatchContext(0, 0, Documents(lengths, isolate=True, restart=False)).active():
        torch.testing.assert_close(layer(x), want)
        layer.config = replace(config, attention_dropout=1e-12)
        torch.testing.assert_close(layer.train()(x), want)


def test_a_model_reads_documents_as_if_each_came_alone():
    """With both resets a packed row is its documents one after another."""
    tokens = torch.tensor([[5, 6, 7, EOD, 8, 9, EOD, 10, 11, 12, 13, 14]])
    documents = find_documents(tokens, EOD, isolate=True, restart=True)
    assert documents.lengths == ((4, 3, 5),)
    ids = positions(12, WHOLE, documents, tokens.device)
    for config in (GPT2, LLAMA):
        model = whole(config)
        with MicrobatchContext(0, 0, documents).active():
            packed = model(tokens, ids)
        torch.testing.assert_close(packed, torch.cat([model(part) for part in tokens.split((4, 3, 5), dim=1)], dim=1))


def test_rotary_positions_need_no_restart_where_attention_stays_inside_documents():
    """Rotation is relative; with attention across documents the restart does change the model."""
    tokens = torch.tensor([[5, 6, 7, EOD, 8, 9, EOD, 10, 11, 12, 13, 14]])
    model = whole(LLAMA)
    out = {}
    for isolate in (True, False):
        for restart in (True, False):
            with MicrobatchContext(0, 0, find_documents(tokens, EOD, isolate=isolate, restart=restart)).active():
                out[isolate, restart] = model(tokens)
    torch.testing.assert_close(out[True, True], out[True, False])
    assert not torch.allclose(out[False, True], out[False, False])
    assert torch.equal(out[False, False], model(tokens))


def test_compiled_layers_heed_the_documents_of_each_microbatch():
    torch.compiler.reset()
    plain, compiled = (whole(replace(LLAMA, num_layers=1)) for _ in range(2))
    compile_layers(compiled, "aot_eager")
    tokens = torch.randint(4, VOCAB, (1, SEQ), generator=torch.Generator().manual_seed(0))
    for end in (2, 8):
        tokens[0, end] = EOD
        with MicrobatchContext(0, 0, find_documents(tokens, EOD, isolate=True, restart=True)).active():
            torch.testing.assert_close(compiled(tokens), plain(tokens))


def test_the_token_that_ends_a_row_begins_no_empty_document():
    tokens = torch.tensor([[1, EOD, 2, EOD], [EOD, 1, 2, 5]])
    assert find_documents(tokens, EOD, isolate=True, restart=True).lengths == ((2, 2), (1, 3))


@pytest.mark.parametrize(
    "field, formula",
    [
        ("squared_relu", lambda x, _: x.clamp(min=0) ** 2),
        ("swiglu", lambda gate, up: gate / (1 + torch.exp(-gate)) * up),
        ("quick_geglu", lambda gate, up: gate / (1 + torch.exp(-1.702 * gate)) * up),
    ],
)
def test_activations_equal_their_formulas(field, formula):
    mlp, x = built(MLP(replace(LLAMA, **{"swiglu": False, field: True}), Axis())), random(5, 2, 32)
    first = x @ mlp.linear_fc1.weight.t()
    gate, up = first.chunk(2, -1) if field != "squared_relu" else (first, first)
    assert gate.shape[-1] == LLAMA.ffn
    torch.testing.assert_close(mlp(x), formula(gate, up) @ mlp.linear_fc2.weight.t())


def test_gelu_has_the_tanh_form():
    mlp, x = built(MLP(GPT2, Axis())), random(5, 2, 32)
    y = x @ mlp.linear_fc1.weight.t()
    y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    torch.testing.assert_close(mlp(x), F.linear(y, mlp.linear_fc2.weight))


@pytest.mark.parametrize("field", ["no_bias_gelu_fusion", "disable_bias_linear"])
def test_gelu_has_the_erf_form_where_megatron_does_not_fuse_it(field):
    mlp, x = built(MLP(replace(GPT2, **{field: True}), Axis())), random(5, 2, 32)
    y = x @ mlp.linear_fc1.weight.t()
    y = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
    torch.testing.assert_close(mlp(x), F.linear(y, mlp.linear_fc2.weight), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_may_keep_their_weight_minus_one(kind):
    plain, shifted = (built(Norm(replace(GPT2, normalization=kind, apply_layernorm_1p=on), 32)) for on in (False, True))
    x = random(5, 32)
    assert not shifted.weight.any()
    torch.testing.assert_close(shifted(x), plain(x))
    with torch.no_grad():
        shifted.weight += 0.5
        plain.weight += 0.5
    torch.testing.assert_close(shifted(x), plain(x))


def test_embeddings_may_have_a_deviation_of_their_own():
    base, own = (dict(whole(replace(GPT2, embedding_init_method_std=std)).named_parameters()) for std in (None, 0.2))
    for name in base:
        factor = 10.0 if "embedding" in name or "output_layer" in name else 1.0
        torch.testing.assert_close(own[name], factor * base[name], rtol=1e-5, atol=0)
    llama = dict(whole(replace(LLAMA, embedding_init_method_std=0.2)).named_parameters())
    assert llama["output_layer.weight"].std() < 0.03 < llama["embedding.word_embeddings.weight"].std()


def test_a_routers_bias_begins_as_its_weights_do_and_not_at_0():
    """Megatron-LM draws it by its init_method; from 0 the first steps choose other experts."""
    model = replace(GPT2, num_experts=512, moe_ffn_hidden_size=8, init_method_std=0.5)
    biases = [x.detach() for name, x in whole(model).named_parameters() if name.endswith("router.bias")]
    assert len(biases) == model.layers
    for bias in biases:
        assert float(bias.mean()) == pytest.approx(0, abs=5 * 0.5 / 512**0.5)
        assert float(bias.std()) == pytest.approx(0.5, rel=0.2)


def test_xavier_weights_are_uniform_within_the_bound_of_the_whole_matrix():
    """sqrt(6 / (in + out)); gate and up are one matrix, as in Megatron-LM. An embedding's own deviation stays."""
    uniform, layer = replace(LLAMA, init_method_xavier_uniform=True), "decoder.layers.0."
    weights = {name: w.detach() for name, w in whole(uniform).named_parameters()}
    for name, inputs, outputs in (
        (f"{layer}self_attention.linear_qkv.weight", 32, 64),
        (f"{layer}self_attention.linear_proj.weight", 32, 32),
        (f"{layer}mlp.linear_fc1.weight", 32, 96),
        (f"{layer}mlp.linear_fc2.weight", 48, 32),
        ("embedding.word_embeddings.weight", 32, VOCAB),
        ("output_layer.weight", 32, VOCAB),
    ):
        bound = math.sqrt(6 / (inputs + outputs))
        assert 0.98 * bound < weights[name].abs().max() <= bound, name
        assert weights[name].std() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
    own = dict(whole(replace(GPT2, init_method_xavier_uniform=True, embedding_init_method_std=0.5)).named_parameters())
    assert own["embedding.word_embeddings.weight"].detach().std() == pytest.approx(0.5, rel=0.05)
