"""What layers cost by formula, against built models: parameters, FLOPs that torch counts, activations kept."""

from dataclasses import replace

import pytest
import torch
from tiny import LAYERS, STYLES
from torch.utils.flop_counter import FlopCounterMode

from megapipe.config import ModelConfig, ParallelConfig
from megapipe.distributed.axis import ALONE, Axis
from megapipe.models.layer import TransformerLayer
from megapipe.models.provider import gpt_provider
from megapipe.partition.spans import LayerSpan
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import pieces
from megapipe.plan.context import expert_bytes
from megapipe.tensor_parallel.rng import initialize

WHOLE = LayerSpan(0, LAYERS, True, True)
MIXED = '{"0": {"no_mlp": true}, "1": {"ffn_hidden_size": 24, "qk_layernorm": true}, "3": {"no_attention": true}}'


LATENT = '{"2": {"multi_latent_attention": true, "q_lora_rank": 12, "kv_lora_rank": 10, "v_head_dim": 6}}'


@pytest.mark.parametrize("overrides", [None, MIXED, LATENT])
@pytest.mark.parametrize("style", STYLES)
def test_parameters_by_formula_are_those_of_the_built_model(style, overrides):
    model = replace(STYLES[style], per_layer_overrides=overrides)
    built = gpt_provider(model, WHOLE, Axis())
    assert pieces(model, 12).stage(WHOLE).parameters == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("style", STYLES)
def test_flops_by_formula_are_those_that_torch_counts(style):
    seq, batch = 8, 3
    model: ModelConfig = replace(STYLES[style], attention_backend="unfused", per_layer_overrides=MIXED)
    whole = gpt_provider(model, WHOLE, Axis()).eval()
    for param in whole.parameters():
        torch.nn.init.normal_(param)
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        whole(tokens, labels=tokens)
    scores = sum(4 * seq * seq * batch * model.heads * model.head_dim for layer in (0, 1, 2))
    # torch counts scores whole, the formula the causal half.
    assert pieces(model, seq, batch).stage(WHOLE).f == counter.get_total_flops() - scores / 2


@pytest.mark.parametrize("span", [LayerSpan(0, 1, False, False), LayerSpan(4, 0, False, True)], ids=["layer", "head"])
@pytest.mark.parametrize("style", STYLES)
def test_activations_by_formula_are_those_that_autograd_keeps(style, span):
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "ffn_hidden_size": 1024, "padded_vocab_size": 4096}
    model = replace(STYLES[style], **sizes, attention_dropout=0.0)
    assert pieces(model, 64, 2).stage(span).held == pytest.approx(saved(model, span), rel=0.12)


def saved(model: ModelConfig, span: LayerSpan) -> int:
    """The bytes that autograd keeps of 2 sequences of 64 tokens until their backward begins."""
    stage = gpt_provider(model, span, Axis())
    for param in stage.parameters():
        torch.nn.init.normal_(param, std=0.02)
    weights = {param.untyped_storage().data_ptr() for param in stage.parameters()}
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()  # held, so that no address comes twice
        return x

    stage.set_input_tensor(torch.randn(64, 2, model.hidden, requires_grad=True))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        stage(labels=torch.zeros(2, 64, dtype=torch.long))
    return sum(storage.nbytes() for address, storage in kept.items() if address not in weights)


@pytest.mark.parametrize("together", [1, 2, 3, 8])
def test_a_stage_of_three_layers_makes_at_most_three_again_at_once(together):
    """Groups of 2 keep two inputs, of 8 as of 3 one: counted in tensors that autograd keeps of built layers."""
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "ffn_hidden_size": 1024, "padded_vocab_size": 4096}
    plain = replace(STYLES["llama"], **sizes, num_layers=6, attention_dropout=0.0, hidden_dropout=0.0)
    each = replace(plain, recompute_granularity="full")
    model = replace(each, recompute_num_layers=together)
    costs, alone = (pieces(one, 64, 2).costs((1, 3, 2)) for one in (model, each))
    assert costs.mem_b[1] == saved(model, LayerSpan(1, 3, False, False))
    made, one = (saved(plain, LayerSpan(1, n, False, False)) for n in (min(together, 3), 1))
    assert costs.mem_p[1] - alone.mem_p[1] == pytest.approx(made - one, rel=0.12)


def test_a_number_of_layers_alone_or_by_block_groups_none():
    model = replace(STYLES["llama"], num_layers=6, padded_vocab_size=64, recompute_num_layers=2)
    block = replace(model, recompute_granularity="full", recompute_method="block")
    none, idle, blocks = (
        pieces(one, 8).costs((3, 3)) for one in (replace(model, recompute_num_layers=None), model, block)
    )
    assert idle == none
    assert blocks.mem_b == none.mem_b


EXPERTS = {
    "plain": {},
    "some layers, with losses": {"moe_layer_freq": "2", "moe_aux_loss_coeff": (0.1,), "moe_z_loss_coeff": 0.1},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": (0.1,), "moe_router_topk": 4},
    "padded": {"moe_expert_capacity_factor": 0.75, "moe_pad_expert_input_to_capacity": True},
    "shared": {"moe_shared_expert_intermediate_size": 192, "moe_shared_expert_gate": True},
    "again": {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    "on one rank by all-to-all": {"moe_token_dispatcher_type": "alltoall"},
}
SPARSE = {"hidden_size": 256, "num_attention_heads": 8, "num_experts": 16, "moe_ffn_hidden_size": 192}


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("style", STYLES)
def test_experts_by_formula_are_those_of_the_built_model(style, kind):
    """Parameters, those that a token uses, and FLOPs of the rows that experts compute."""
    small = {
        "num_experts": 16,
        "moe_ffn_hidden_size": 24,
    }  # torch does not count oneDNN's products, which large ones are
    model = replace(STYLES[style], **small, **EXPERTS[kind], attention_backend="unfused")
    whole = gpt_provider(model, WHOLE, Axis()).eval()
    work = pieces(model, 12, 2).stage(WHOLE)
    assert work.parameters == sum(p.numel() for p in whole.parameters())
    stacks = [p for name, p in whole.named_parameters() if ".experts." in name]
    assert work.unused == sum(p.numel() // 16 * (16 - model.moe_router_topk) for p in stacks)
    for param in whole.parameters():
        torch.nn.init.normal_(param, std=0.02)
    tokens = torch.arange(24).view(2, 12)
    with FlopCounterMode(display=False) as counter:
        whole(tokens, labels=tokens)
    scores = sum(4 * 12 * 12 * 2 * model.heads * model.head_dim for _ in range(LAYERS))
    assert work.f == counter.get_total_flops() - scores / 2


@pytest.mark.parametrize("kind", EXPERTS)
def test_what_a_layer_of_experts_holds_is_counted_to_a_hundredth(kind):
    sizes = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "no_attention": True}
    model = replace(STYLES["gpt2"], **SPARSE, **EXPERTS[kind], **sizes)
    held = pieces(model, 256, 2, element_bytes=2).layers[0].held
    assert held == pytest.approx(bytes_of(model, ALONE, 256), rel=0.01)


@pytest.mark.parametrize("layout", [{"dp": 4, "ep": 4}, {"dp": 4, "ep": 2, "etp": 2}, {"tp": 2, "ep": 2, "etp": 1}])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_what_a_rank_holds_of_a_layer_whose_experts_are_shared_is_counted_to_three_thousandths(dispatcher, layout):
    """In the mean of the ranks, whose loads differ."""
    sizes = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "no_attention": True, "sequence_parallel": True}
    model = replace(STYLES["gpt2"], **SPARSE, **sizes, moe_token_dispatcher_type=dispatcher)
    tp = layout.get("tp", 1)
    real = run_threads(lambda mesh: bytes_of(model, mesh.tp, 256 // tp), **layout)
    ranks = {"tp": tp, "ep": layout["ep"], "etp": layout.get("etp")}
    held = pieces(model, 256, 2, element_bytes=2, **ranks).layers[0].held
    assert held == pytest.approx(sum(real) / len(real), rel=0.003)


LATENTS = {
    "multi_latent_attention": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 32,
}
HEADS = {
    "each its own keys": {},
    "four to a group": {"group_query_attention": True, "num_query_groups": 2},
    "one group": {"group_query_attention": True, "num_query_groups": 1},
    "rotated, four to a group": {
        "group_query_attention": True,
        "num_query_groups": 2,
        "position_embedding_type": "rope",
    },
    "latents, narrow values": {**LATENTS, "v_head_dim": 32},
    "latents, wide values": {**LATENTS, "v_head_dim": 128},
}


@pytest.mark.parametrize("window", [None, "63,0", "127,0", "299,0"])
@pytest.mark.parametrize("heads", HEADS)
def test_what_attention_holds_inside_a_window_is_counted_to_a_hundredth(heads, window):
    """Blocks of queries keep outputs, masks and, of groups, repeated keys: up to a half was not counted."""
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    model = replace(STYLES["gpt2"], **sizes, **HEADS[heads], no_mlp=True, window_size=window)
    turned = 64 if model.position_embedding_type == "rope" or model.multi_latent_attention else 0
    tables = 512 * turned * 4  # cosine and sine, which all layers share
    held = pieces(model, 512, 2, element_bytes=2).layers[0].held
    assert held + tables == pytest.approx(bytes_of(model, ALONE, 512), rel=0.01)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("heads", HEADS)
def test_what_attention_of_all_tokens_holds_is_counted_to_the_byte(heads, dropout):
    """But for the mean and deviation of a norm, 2 bytes each. Attention by blocks keeps a logarithm for each head."""
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "attention_dropout": dropout, "hidden_dropout": 0.0}
    model = replace(STYLES["gpt2"], **sizes, **HEADS[heads], no_mlp=True)
    turned = 64 if model.position_embedding_type == "rope" or model.multi_latent_attention else 0
    tables, norm = 256 * turned * 4, 2 * 256 * 4
    held = pieces(model, 256, 2, element_bytes=2).layers[0].held
    assert held + tables + norm == bytes_of(model, ALONE, 256)


def test_what_the_projection_of_latent_attention_keeps_goes_by_its_name():
    model = replace(STYLES["gpt2"], **HEADS["latents, wide values"], hidden_dropout=0.0)
    (layer, *_) = pieces(model, 1024, 2, element_bytes=2, modules=("attn_proj",)).layers
    assert layer.copied == 2 * 1024 * model.heads * 128 * 2


@pytest.mark.parametrize("parts", [{}, {"num_experts": 4, "moe_shared_expert_intermediate_size": 512}])
def test_a_gate_by_a_sigmoid_keeps_three_tensors_of_the_mlps_width(parts):
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    gate = {"quick_geglu": True, "no_attention": True, "ffn_hidden_size": 512}
    model = replace(STYLES["gpt2"], **sizes, **gate, **parts)
    held = pieces(model, 1024, 2, element_bytes=2).layers[0].held
    assert held == pytest.approx(bytes_of(model, ALONE, 1024), rel=0.02)


@pytest.mark.parametrize("sharded", [False, True])
def test_flops_of_latents_on_ranks_that_go_down_to_them_each_by_itself_are_those_that_torch_counts(sharded):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    latents = {**LATENTS, "v_head_dim": 64, "attention_backend": "unfused", "sequence_parallel": sharded}
    model = replace(STYLES["gpt2"], **sizes, **latents, no_mlp=True)
    seq, batch, tp = 8, 2, 4

    def counted(mesh):
        layer = TransformerLayer(model, mesh.tp, 0)
        initialize(layer, 1, mesh.tp)
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(seq // (tp if sharded else 1), batch, 64))
        return counter.get_total_flops()

    scores = 4 * seq * seq * batch * model.heads * 64  # torch counts them whole, the formula the causal half
    assert pieces(model, seq, batch, tp=tp).layers[0].f == sum(run_threads(counted, tp=tp)) - scores / 2


def test_bytes_of_an_all_to_all_are_those_that_ranks_send(monkeypatch):
    """Where each expert takes as many rows, the load is even."""
    even = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True, "no_attention": True}
    model = replace(STYLES["llama"], **SPARSE, **even, moe_token_dispatcher_type="alltoall")
    sent, start = [], Axis.start_all_to_all

    def counted(axis, x, rows):
        sent.append((sum(rows[axis.rank]) - rows[axis.rank][axis.rank]) * x[:1].nbytes)
        return start(axis, x, rows)

    monkeypatch.setattr(Axis, "start_all_to_all", counted)
    run_threads(lambda mesh: bytes_of(model, mesh.tp, 64), dp=4, ep=2, etp=2)
    par = ParallelConfig(expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    forth, back, once = expert_bytes(model, par, 128, element_bytes=2)
    assert max(sent) == once
    assert sum(sent) / 4 == pytest.approx(forth, rel=0.01)  # weights of two bytes, there alone
    assert back == forth


def bytes_of(model, tp, rows):
    """What a layer keeps for backward of sequences of so many tokens."""
    layer = TransformerLayer(model, tp, 0).bfloat16()
    initialize(layer, 1, tp)
    weights = {param.untyped_storage().data_ptr() for param in layer.parameters()}
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = layer(torch.randn(rows, 2, 256).bfloat16().requires_grad_())
    for moves in (node.how.dispatcher for node in nodes(y.grad_fn) if hasattr(node, "how")):
        for table in (x for x in (*moves._rows, *vars(moves).values()) if isinstance(x, torch.Tensor)):
            keep(table)
    return sum(storage.nbytes() for address, storage in kept.items() if address not in weights)


def nodes(node):
    """Of a graph, from its end."""
    found, left = set(), [node]
    while left:
        if (node := left.pop()) is not None and node not in found:
            found.add(node)
            left += [before for before, _ in node.next_functions]
    return found


@pytest.mark.parametrize("vocab, holds", [(1 << 16, True), (1 << 17, False)])
def test_the_plan_counts_the_logits_that_the_fused_loss_keeps(vocab, holds):
    model = replace(STYLES["gpt2"], padded_vocab_size=vocab)
    plain, fused = (pieces(replace(model, cross_entropy_loss_fusion=f), 1024).head for f in (False, True))
    assert fused.b == plain.b * (1 if holds else 2)
    assert fused.held == (plain.held if holds else plain.held - 4 * 1024 * vocab)
