"""Attention over context-parallel ranks against torch's of the whole sequence, and what becomes of a run's flags."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.config import BatchConfig, Config, ModelConfig, ParallelConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.tokens import Cut, Documents, share_of
from megapipe.errors import ConfigError
from megapipe.flags.idle import idle
from megapipe.models.attention import blocks
from megapipe.models.attention.layer import SelfAttention
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan.context import context_bytes
from megapipe.plan.pieces import pieces
from megapipe.tensor_parallel.rng import MicrobatchContext, initialize
from tools.bench.context import layer_of

S, B, HIDDEN, HEADS = 48, 2, 32, 4
LENGTHS = ((5, 30, 13), (48,))
BASE = ModelConfig(
    num_layers=1,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    max_position_embeddings=S,
    padded_vocab_size=32,
    attention_dropout=0.0,
    group_query_attention=True,
    num_query_groups=4,
)


def unsplit(layer: SelfAttention, x: Tensor, window: int | None, documents: Documents | None) -> Tensor:
    """The same by torch's attention with a mask of s x s. x: [s, b, h]."""
    config, mask = layer.config, torch.ones(S, S, dtype=torch.bool).tril()
    mask = (mask if window is None else mask.triu(-window)).expand(B, 1, S, S)
    if documents is not None:
        number = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in documents.lengths])
        mask = mask & (number[:, None, :, None] == number[:, None, None, :])
    groups, d = config.query_groups, config.head_dim
    qkv = F.linear(x, layer.linear_qkv.weight, layer.linear_qkv.bias).view(S, B, groups, -1, d)
    q, k, v = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in qkv.split((HEADS // groups, 1, 1), dim=3))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return F.linear(out.permute(2, 0, 1, 3).flatten(2), layer.linear_proj.weight, layer.linear_proj.bias)


@pytest.mark.parametrize("c", [2, 4])
@pytest.mark.parametrize("way", ["p2p", "all_gather", "a2a"])
def test_the_ranks_together_compute_attention_of_the_whole_sequence(way, c, monkeypatch):
    """Outputs and every gradient in float64: windows x documents x groups of keys, in many blocks."""
    monkeypatch.setattr(blocks, "_ROWS", 16)
    monkeypatch.setattr(blocks, "_SCORES", 1)
    models = [
        replace(BASE, cp_comm_type=(way,), window_size=window, num_query_groups=groups)
        for window in (None, "9,0")
        for groups in ((2, 4) if (way, c) != ("a2a", 4) else (4,))
    ]
    cases = [(model, documents) for model in models for documents in (None, Documents(LENGTHS, True, False))]
    x, grad = torch.randn(2, S, B, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def local(mesh: ProcessMesh) -> list[list[Tensor]]:
        found = []
        for model, documents in cases:
            layer = SelfAttention(model, mesh.tp, 0).double()
            initialize(layer, 1, mesh.tp)
            mine = Cut(mesh.cp.rank, c).take(x, 0).clone().requires_grad_()
            with MicrobatchContext(1, 0, documents, cp=mesh.cp).active():
                out = layer(mine)
            out.backward(Cut(mesh.cp.rank, c).take(grad, 0))
            found.append([out.detach(), mine.grad, *(param.grad for param in layer.parameters())])
        return found

    for (model, documents), ranks in zip(cases, zip(*run_threads(local, cp=c), strict=True), strict=True):
        layer = SelfAttention(model, ProcessMesh.single().tp, 0).double()
        initialize(layer, 1, ProcessMesh.single().tp)
        whole = x.clone().requires_grad_()
        out = unsplit(layer, whole, model.window, documents)
        out.backward(grad)
        wanted = [out.detach(), whole.grad, *(param.grad for param in layer.parameters())]
        for number, (parts, theirs) in enumerate(zip(zip(*ranks, strict=True), wanted, strict=True)):
            mine = Cut(0, c).join(parts, 0) if number < 2 else sum(parts)
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("c", [1, 2, 4])
def test_every_token_is_on_one_rank_and_ranks_have_the_same_causal_work(c):
    spans = [Cut(rank, c).spans(64) for rank in range(c)]
    assert sorted(token for tokens in spans for span in tokens for token in span) == list(range(64))
    assert len({sum(token + 1 for span in tokens for token in span) for tokens in spans}) == 1
    thirds = [share_of(spans[0], n, 4) for n in range(4)]
    assert [token for part in thirds for span in part for token in span] == [t for span in spans[0] for t in span]
    whole = torch.arange(64)
    assert Cut(0, c).join([Cut(rank, c).take(whole, 0) for rank in range(c)], 0).equal(whole) or c == 1


def config(c: int = 2, seq_length: int = 48, **model) -> Config:
    return Config(
        model=replace(BASE, **model),
        parallel=ParallelConfig(context_parallel_size=c),
        batch=BatchConfig(seq_length=seq_length),
        world_size=c,
    )


def test_a_kernel_of_whole_sequences_has_nothing_to_do_in_a_ring():
    said = "context-parallel ranks compute attention in blocks of plain torch, without --cp-comm-type a2a"
    assert idle(config(attention_backend="flash")) == [("--attention-backend flash", said)]
    assert idle(config(attention_backend="flash", cp_comm_type=("a2a",))) == []


def test_a_microbatch_of_another_length_is_refused_too():
    with pytest.raises(ConfigError, match="cuts sequences into 4 equal pieces, and 10 = 4 x 2 \\+ 2"):
        Cut(0, 2).spans(10)


@pytest.mark.parametrize(
    ("way", "c", "groups"), [("p2p", 4, 4), ("a2a+p2p", 2, 2), ("all_gather", 2, 4), ("a2a", 4, 4)]
)
def test_a_rank_holds_and_sends_what_the_plan_says(way, c, groups):
    """Blocks of keys and values by kv head: 2 (c - 1) forward, twice that backward; heads for tokens: (c - 1) / c."""
    model = replace(BASE, hidden_size=128, num_query_groups=groups, cp_comm_type=(way,), hidden_dropout=0.0)
    if groups < HEADS:
        model = replace(model, position_embedding_type="rope")
    block = 256 // c * B * model.query_groups * model.head_dim * 4
    trade = (c - 1) * 256 // c // c * B * 2 * (HEADS + model.query_groups) * model.head_dim * 4
    wanted = (trade, trade) if way == "a2a" else (2 * (c - 1) * block, 4 * (c - 1) * block)
    assert context_bytes(model, 256 * B, ranks=c) == wanted
    for held, *sent in run_threads(lambda mesh: layer_of(mesh, model, 256, B), cp=c):
        assert tuple(sent) == wanted
        assert held == pytest.approx(pieces(model, 256, B, cp=c).layers[0].held, rel=0.03)
