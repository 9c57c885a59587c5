"""A gated delta net: transformers' layer, ranks as one process, documents, and what it costs by formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import LLAMA, run_step
from torch.utils.flop_counter import FlopCounterMode

from megapipe.distributed.axis import ALONE
from megapipe.distributed.tokens import Documents
from megapipe.models.delta.layer import GatedDeltaNet
from megapipe.models.delta.rule import gated_delta_rule
from megapipe.models.layer import TransformerLayer
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import pieces
from megapipe.plan.layers.delta import delta_flops
from megapipe.schedule import build
from megapipe.tensor_parallel.rng import MicrobatchContext, initialize
from tools.proofs.equivalence_case import Case
from tools.proofs.fuzz_equivalence import run

DELTA = replace(
    LLAMA,
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq="2",
    linear_conv_kernel_dim=4,
    linear_key_head_dim=6,
    linear_value_head_dim=10,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    max_position_embeddings=200,
)


def drawn(model=DELTA) -> GatedDeltaNet:
    net = GatedDeltaNet(model, ALONE)
    initialize(net, 1, ALONE)
    torch.manual_seed(3)
    with torch.no_grad():
        for param in net.parameters():
            param += 0.1 * torch.randn_like(param)
    return net


def test_outputs_and_gradients_are_those_of_transformers_layer():
    """Its rows are by key head too, and its convolution has all queries, all keys, all values."""
    from transformers import Qwen3NextConfig  # half a second, which every worker of the suite would spend
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    ours = drawn()
    theirs = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=32,
            linear_key_head_dim=6,
            linear_value_head_dim=10,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            rms_norm_eps=DELTA.norm_epsilon,
            num_hidden_layers=1,
        ),
        0,
    )
    rows = ours.in_proj.weight.detach().view(4, 56, 32)
    taps = ours.conv1d.weight.detach().split([6, 6, 20], 1)
    with torch.no_grad():
        theirs.in_proj_qkvz.weight.copy_(rows[:, :52].flatten(0, 1))
        theirs.in_proj_ba.weight.copy_(rows[:, 52:].flatten(0, 1))
        theirs.conv1d.weight.copy_(torch.cat([part.flatten(0, 1) for part in taps])[:, None])
        theirs.A_log.copy_(ours.A_log)
        theirs.dt_bias.copy_(ours.dt_bias)
        theirs.norm.weight.copy_(ours.out_norm.weight)
        theirs.out_proj.weight.copy_(ours.out_proj.weight)
    x = torch.randn(2, 150, 32)
    mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    want = theirs(its)
    got = ours(mine.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6 * want.abs().max().item())
    grad = torch.randn_like(want)
    want.backward(grad)
    got.backward(grad)
    torch.testing.assert_close(mine.grad, its.grad, rtol=0, atol=1e-5 * its.grad.abs().max().item())
    for name in ("A_log", "dt_bias", "out_proj.weight"):
        got, want = ours.get_parameter(name).grad, theirs.get_parameter(name).grad
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * want.abs().max().item())


def test_a_document_is_computed_as_if_it_were_alone():
    net = drawn().double()
    x = torch.randn(150, 2, 32, dtype=torch.float64)
    lengths = ((70, 80), (1, 149))
    with MicrobatchContext(0, 0, documents=Documents(lengths, True, False)).active():
        together = net(x)
    for row, of_row in enumerate(lengths):
        alone = [net(part) for part in x[:, row : row + 1].split(list(of_row))]
        torch.testing.assert_close(together[:, row : row + 1], torch.cat(alone))


@pytest.mark.parametrize("sequence_parallel, schedule", [(False, "1f1b"), (True, "1f1b"), (True, "zb-h1")])
def test_ranks_have_the_losses_and_gradients_of_one_process(schedule, sequence_parallel):
    (losses, one) = run_threads(lambda mesh: run_step(mesh, DELTA, build("1f1b", 1, 2)), pp=1)[0]
    model = replace(DELTA, sequence_parallel=sequence_parallel)
    ranks = run_threads(lambda mesh: run_step(mesh, model, build(schedule, 2, 2)), pp=2, tp=2)
    for found, _ in ranks:
        assert not found or found == pytest.approx(losses, rel=1e-11)
    for name, (want, _, _) in one.items():
        parts = [rank[1][name] for rank in ranks if name in rank[1]]
        _, dim, full = parts[0]
        tensors = [part.view([-1 if i == dim else n for i, n in enumerate(full)]) for part, _, _ in parts]
        whole = torch.cat(tensors, dim) if dim is not None else tensors[0]
        torch.testing.assert_close(whole.view_as(want), want, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("documents", ["none", "both"])
def test_context_parallel_ranks_train_as_one_process(recompute, documents):
    case = Case("zb-h1", 1, 2, (2,), cp=2, way="a2a", style="delta", recompute=recompute, steps=2)
    assert run(replace(case, documents=documents)) == []


def test_parameters_by_formula_are_those_of_the_built_layer():
    layer = TransformerLayer(DELTA, ALONE, 0)
    assert pieces(DELTA, 12).layers[0].parameters == sum(p.numel() for p in layer.parameters())


def test_flops_of_the_rule_by_formula_are_those_that_torch_counts():
    """It counts no triangular systems: the tokens of three chunks, by 64 and the widths of both right sides."""
    q, k = (torch.randn(2, 4, 150, 6, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 4, 2, 150, 10, requires_grad=True)
    gates = (-torch.rand(2, 4, 2, 150), torch.rand(2, 4, 2, 150))
    with FlopCounterMode(display=False) as forward:
        out = gated_delta_rule(q, k, v, *gates)
    solved = 192 * 2 * 8 * 64 * (6 + 10)
    assert 2 * 150 * delta_flops(DELTA, 150) == forward.get_total_flops() + solved
    with FlopCounterMode(display=False) as backward:
        out.backward(torch.randn_like(out))
    # The first state is 0 and the last one is not used.
    assert backward.get_total_flops() == pytest.approx(2 * (forward.get_total_flops() + solved), rel=0.05)


def test_activations_by_formula_are_those_that_autograd_keeps():
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "no_mlp": True, "normalization": "LayerNorm"}
    model = replace(DELTA, **sizes, linear_key_head_dim=16, linear_value_head_dim=24)
    layer = TransformerLayer(model, ALONE, 0)
    initialize(layer, 1, ALONE)
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        layer(torch.randn(150, 2, 256, requires_grad=True))
    held = sum(storage.nbytes() for address, storage in kept.items() if address not in weights)
    assert held == pytest.approx(pieces(model, 150, 2).layers[0].held, rel=0.01)
