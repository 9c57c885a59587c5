"""Transformer Engine's layers compute what ours do. Its Python layer is the real one; kernels need a GPU."""

import os
from dataclasses import replace
from functools import cache

import pytest
import te_ranks
import te_shim
import torch
from rank_pool import WORLD
from tiny import GPT2, LLAMA, run_step

from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build

WHY_NOT = te_shim.absent()
with_wheel = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
PLAIN = replace(GPT2, attention_dropout=0.0, hidden_dropout=0.0)
MICROBATCHES = 2
MODELS = {
    "gpt2": PLAIN,
    "gpt2 with dropout": GPT2,
    "llama": LLAMA,
    "llama, norms of heads, 1p, window": replace(LLAMA, qk_layernorm=True, apply_layernorm_1p=True, window_size="3,0"),
    "recompute all": replace(PLAIN, recompute_granularity="full"),
    "recompute attention": replace(LLAMA, recompute_granularity="selective"),
    "recompute MLPs and norms": replace(
        PLAIN, recompute_granularity="selective", recompute_modules=("mlp", "layernorm")
    ),
    "torch's attention": replace(LLAMA, attention_backend="unfused"),
}


@cache
def whole(name):
    """Plain torch, unsplit, in float64."""
    return run_step(ProcessMesh.single(), MODELS[name], build("naive", 1, MICROBATCHES))


LAYOUTS = [(1, 4, 1, "naive", False), (1, 2, 2, "1f1b", False), (2, 1, 2, "zb-h1", True), (2, 1, 2, "1f1b", True)]
# scripts/nightly.sh: every model in each; else each layout has two of them.
EACH_IN = [
    (name, *layout)
    for n, name in enumerate(MODELS)
    for layout in (LAYOUTS if os.environ.get("MEGAPIPE_NIGHTLY") else LAYOUTS[n % 4 : n % 4 + 1])
]


@with_wheel
@pytest.mark.parametrize(("name", "pp", "dp", "tp", "schedule", "sequence_parallel"), EACH_IN)
def test_a_model_of_its_layers_equals_ours(pool, name, pp, dp, tp, schedule, sequence_parallel):
    losses, gradients = whole(name)
    model = replace(MODELS[name], sequence_parallel=sequence_parallel)
    ranks = pool.run(te_ranks.step, [(pp, dp, tp)], model, schedule, MICROBATCHES)
    assert [found for found, _ in ranks if found] == [pytest.approx(losses, rel=1e-6)] * (WORLD // pp)
    for rank, (_, local) in enumerate(ranks):
        for param, (gradient, dim, full) in local.items():
            expected = gradients[param][0].reshape(full)
            if dim is not None:
                expected = expected.chunk(tp, dim)[rank % tp]
            expected = expected.reshape(gradient.shape).float()
            scale = gradients[param][0].abs().max().item()
            torch.testing.assert_close(torch.from_numpy(gradient), expected, rtol=1e-5, atol=1e-5 * scale)


@with_wheel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("tp", [1, 2])
def test_weight_passes_in_any_order_add_up(pool, tp, kind, sequence_parallel, dtype):
    """In bf16 too: what goes into main_grad is never rounded to it."""
    local = run_threads(
        lambda mesh: te_ranks.three_microbatches(te_ranks.LOCAL[kind], mesh.tp, kind, sequence_parallel, torch.float32),
        tp=tp,
    )
    ranks = pool.run(te_ranks.linear, [(1, WORLD // tp, tp)], kind, sequence_parallel, dtype)
    for rank, theirs in enumerate(ranks):
        assert not theirs["weight before W"].any()
        assert theirs["weight after BW"].any()
        for name, expected in local[rank % tp].items():
            rounded = dtype == torch.bfloat16 and name[0] in "yd"  # y0, dx0, below 0.25: on each rank, and summed
            tolerance = {"rtol": 2**-8, "atol": 2**-10} if rounded else {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(torch.from_numpy(theirs[name]), expected, **tolerance)


@with_wheel
def test_documents_keep_to_themselves(pool):
    for local, theirs in pool.run(te_ranks.documents, [(1, 2, 2)], LLAMA):
        torch.testing.assert_close(torch.from_numpy(theirs), torch.from_numpy(local))


@with_wheel
def test_a_weight_without_main_grad_gets_an_ordinary_gradient(pool):
    for gradient, expected in pool.run(te_ranks.without_main_grad, [(1, 4, 1)]):
        torch.testing.assert_close(torch.from_numpy(gradient), torch.from_numpy(expected))


@with_wheel
@pytest.mark.parametrize("model", [PLAIN, LLAMA], ids=["gpt2", "llama"])
def test_a_layer_saves_under_the_same_names_and_nothing_else(pool, model):
    for local, theirs in pool.run(te_ranks.names, [(1, 2, 2)], model):
        assert theirs == local


@with_wheel
def test_a_column_layer_is_told_its_part(pool):
    assert pool.run(te_ranks.linear_attributes, [(1, 2, 2)]) == [(2, "column", True, False, 6, 8)] * WORLD


@with_wheel
def test_the_arguments_that_we_rely_on_are_there(pool):
    found = pool.run(te_ranks.contract, [(1, 4, 1)])[0]
    linear, attention = found["Linear"], found["DotProductAttention"]
    assert list(linear)[:2] == ["in_features", "out_features"]
    assert list(attention)[:2] == ["num_attention_heads", "kv_channels"]
    expected = {"fuse_wgrad_accumulation": False, "tp_group": None, "parallel_mode": None, "bias": True}
    expected |= {"sequence_parallel": False, "delay_wgrad_compute": False, "device": "cuda"}
    assert {name: linear[name] for name in expected} == expected
    expected = {"num_gqa_groups": None, "attention_dropout": 0.0, "qkv_format": "sbhd", "attn_mask_type": "causal"}
    expected |= {"window_size": None, "softmax_scale": None, "tp_size": 1}
    assert {name: attention[name] for name in expected} == expected
    for norm in (found["LayerNorm"], found["RMSNorm"]):
        assert (norm["eps"], norm["zero_centered_gamma"]) == (1e-5, False)


@with_wheel
def test_it_is_told_the_recipe_while_a_linear_layer_runs_and_no_longer(pool):
    """Its kernels in eight bits need a GPU: none has run."""
    recipes = ["Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"]
    for found, after in pool.run(te_ranks.recipes, [(1, 4, 1)], LLAMA):
        assert found == [(True, name, "HYBRID") for name in recipes]
        assert not after


@with_wheel
def test_delayed_scales_and_plain_weight_gradients_are_ours(pool):
    assert pool.run(te_ranks.not_theirs, [(1, 4, 1)], LLAMA) == [["ColumnParallelLinear"] * 2] * WORLD
