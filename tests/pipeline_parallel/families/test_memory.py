"""Passes O, L and R on real stages: the same bits, memory as predicted, weights and what others hold stay."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from megapipe.config import ModelConfig
from megapipe.config.parallel.offload import Module
from megapipe.distributed.axis import ALONE, CPU
from megapipe.models.layer import TransformerLayer, name_modules
from megapipe.pipeline_parallel.families.offload.activations import Activations
from megapipe.pipeline_parallel.families.offload.host import Host, Sizes, size_class
from megapipe.tensor_parallel.rng import initialize
from tools.proofs.equivalence_case import Case
from tools.proofs.families.styles import STYLES
from tools.proofs.fuzz_equivalence import run
from tools.proofs.tables import counted
from tools.proofs.tables.moved import MODULES

OUT, AGAIN = {0}, {1}
BYTES = 64 * 64 * 8
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 32}


class Layer(nn.Module):
    """A layer whose graph saves its input, a table that others hold too, its weight and its result, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.float64))
        self.table = torch.randn(64, 64, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.weight) * self.table).sigmoid().square().sum()


@pytest.fixture
def moves() -> Activations:
    return Activations(Layer(), Host(CPU), [Sizes()], 1.0, out=OUT, again=AGAIN)


def given() -> torch.Tensor:
    return torch.randn(64, 64, dtype=torch.float64, requires_grad=True)


def forward(moves: Activations, x: torch.Tensor) -> torch.Tensor:
    with moves.saving(None, 0):
        y = moves.module(x.view_as(x))
    moves.saved(0, y, x)
    return y


def test_each_storage_goes_once_and_neither_weights_nor_what_others_hold(moves: Activations) -> None:
    x = given()
    want = torch.autograd.grad(moves.module(x), [x, moves.module.weight])
    y = forward(moves, x)
    assert moves.sizes[0].saved == 3 * BYTES  # input, table, result
    moves.offload(0)
    assert (moves.sizes[0].copied, moves.held.bytes) == (2 * BYTES, BYTES)
    assert x.untyped_storage().nbytes() == 8, "of the input only the shape is left"
    moves.load(0)()
    assert moves.held.bytes == 3 * BYTES
    y.backward()
    assert torch.equal(x.grad, want[0])
    assert torch.equal(moves.module.weight.grad, want[1])
    assert (moves.held.bytes, moves.held.peak) == (0, 3 * BYTES)


def test_buffers_on_the_host_are_used_again(moves: Activations) -> None:
    for _ in range(3):
        y = forward(moves, given())
        moves.offload(0)
        moves.load(0)()
        y.backward()
    assert moves.host.bytes == 2 * BYTES


def test_a_share_takes_the_first_of_a_forward(moves: Activations) -> None:
    moves.share = 0.3
    x = given()
    y = forward(moves, x)
    moves.offload(0)
    assert moves.sizes[0].copied == BYTES
    assert x.untyped_storage().nbytes() == 8
    moves.load(0)()
    y.backward()


def test_what_was_copied_before_a_wrong_guess_is_given_back(moves: Activations) -> None:
    kept = [forward(moves, given())]
    moves.offload(0)
    moves.forget()
    kept.append(forward(moves, given()))
    moves.offload(0)
    assert moves.host.bytes == 2 * BYTES


def again(module):
    return {"recompute_granularity": "selective", "recompute_modules": (module,)}


T = 2 * 16 * 64 * 4
"""Bytes of a tensor [s, b, h] of float32."""
LATENT = {**STYLES["latent"], "normalization": "LayerNorm", "qk_layernorm": False}
LLAMA = {**STYLES["llama"], "num_query_groups": 2, "ffn_hidden_size": 96}


@pytest.mark.parametrize(
    "modules, more, saved",
    [
        (("attn_norm",), {}, T + 2 * 4 * 32),  # its input, and of each token the mean and the deviation
        (("qkv_linear",), {}, T),
        (("core_attn",), {}, 3 * T),  # queries, keys and values of one product
        (("core_attn", "attn_proj"), {}, 4 * T),
        (("core_attn",), LLAMA, 3.5 * T),  # q and k rotated, and the product of which v is a part: 4 heads, 2 groups
        (("mlp_norm", "qkv_linear"), {}, 2 * T + 2 * 4 * 32),
        (("expert_fc1",), LLAMA | EXPERTS, T),
        (("moe_act",), LLAMA | EXPERTS, 2 * (2 * 32 / 64 * T + 4 * 32)),  # of 2 experts each: gate and up, a weight
        (("expert_fc1",), {}, 0),
        (("qkv_linear",), LATENT, T + 26 / 64 * T),  # the latents of queries, 12, of keys and values, 10, and 4 rotated
        (("core_attn",), LATENT, 3 * 32 / 64 * T),  # 4 heads of 8
        (("qkv_linear", "core_attn"), LATENT | again("mla_up_proj"), T + 30 / 64 * T),  # and these once more
        (("core_attn",), again("core_attn"), 3 * T),
        (("qkv_linear",), again("layernorm"), 0),  # which the norm's own input makes again
        (("attn_norm",), again("layernorm"), T + 2 * 4 * 32),
    ],
)
def test_what_goes_is_what_the_named_modules_saved(modules, more, saved):
    """And the gradients are those of a layer that nobody has asked for names."""
    config = ModelConfig(**{"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, **more})
    x, layers = torch.randn(16, 2, 64), [TransformerLayer(replace(config, **NO_DROPOUT), ALONE, 0) for _ in range(2)]
    for layer in layers:
        initialize(layer, 1, ALONE)
    want, own = (x.clone().requires_grad_() for _ in range(2))
    layers[0](want).square().sum().backward()
    name_modules(layers[1])
    moves = Activations(layers[1], Host(CPU), [Sizes()], 1.0, out=OUT, again=AGAIN, modules=modules)
    y = forward(moves, own).square().sum()
    moves.offload(0)
    assert moves.sizes[0].copied == saved
    moves.load(0)()
    y.backward()
    assert torch.equal(own.grad, want.grad)
    for mine, other in zip(*(layer.parameters() for layer in layers), strict=True):
        assert torch.equal(mine.grad, other.grad)


CASES = [
    Case("zb-h1", 2, 4, (1, 1), memory="some", dtype="float32", tied=False),
    Case(
        "zb-v", 2, 2, (1, 0, 0, 1), memory="some", modules=MODULES[4], style="llama", experts="bias", dtype="bfloat16"
    ),
    Case("dualpipe-v", 2, 4, (1, 0, 1, 0), memory="some", modules=MODULES[3], style="latent", recompute="modules"),
    Case("interleaved", 2, 2, (1, 0, 1, 0), chunks=2, memory="out", recompute="full", vocabulary=True),
    Case("1f1b", 2, 2, (1, 1), memory="again", experts="dropping", dp=2, distributed=True, overlap=True),
    Case("zb-h1", 2, 2, (1, 1), memory="some", style="llama", slices=(3, 3, 2), documents="attention", follows=True),
    Case("1f1b", 2, 2, (1, 1), memory="again", experts="bias", slices=(5, 3), dtype="float32", steps=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.schedule}-{case.memory}")
def test_losses_norms_and_weights_are_those_of_one_process(case: Case) -> None:
    assert run(case) == []


@pytest.mark.parametrize(("slices", "modules"), [((), ()), ((4, 3, 1), MODULES[0])])
def test_the_peak_of_saved_bytes_is_the_predicted_one(slices: tuple[int, ...], modules: tuple[Module, ...]) -> None:
    made = Case("zb-h1", 2, 4 if not slices else 2, (1, 1), memory="some", modules=modules, style="llama", steps=1)
    most, predicted = counted.both(replace(made, slices=slices))
    assert most == predicted


def test_keys_leave_with_the_last_slice_that_sees_them_and_come_back_with_it() -> None:
    moves = Activations(Layer(), Host(CPU), [Sizes(), Sizes()], 1.0, out={1}, again=())
    want = [torch.randn(64, 64, dtype=torch.float64) for _ in range(2)]
    kept = [moves.keep(number, 1, keys.clone()) for number, keys in enumerate(want)]
    for number in range(2):
        with moves.saving(None, number):
            pass
        moves.saved(number, None, None)
    assert (moves.held.bytes, moves.sizes[0].keys) == (2 * BYTES, BYTES)
    moves.offload(1)
    assert (moves.held.bytes, moves.sizes[1].copied) == (0, 2 * BYTES)
    with pytest.raises(AssertionError, match="used while it is on the host"):
        kept[0]()
    moves.load(1)()
    assert all(torch.equal(keys(), wanted) for keys, wanted in zip(kept, want, strict=True))
    kept.append(moves.keep(1, 1, want[1].clone()))  # by a forward that runs again, when all copies are over
    kept.clear()
    assert moves.held.bytes == 0


def test_buffers_on_the_host_do_not_grow_with_the_number_of_different_sizes():
    """With experts over ranks nearly each microbatch has another size, and took a buffer of its own for ever."""
    host, dice = Host(CPU), random.Random(0)
    most = 0
    for _ in range(40):
        host.begin()
        sizes = [dice.randint(100_000, 300_000) for _ in range(8)]
        taken = [host.take(size) for size in sizes]
        assert all(buffer.bytes.numel() >= size for buffer, size in zip(taken, sizes, strict=True))
        most = max(most, sum(sizes))
        for buffer in taken:
            host.give(buffer)
    assert host.bytes <= 2 * most
    for _ in range(2):
        host.begin()
    assert host.bytes == 0, "a step that takes none leaves none to the next"


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 4096, 100_000, 2**20, 2**20 + 1, 3 * 2**29])
def test_a_size_class_holds_its_bytes_and_wastes_at_most_an_eighth(size):
    assert size <= size_class(size) <= max(size * 9 / 8, size + 511)
