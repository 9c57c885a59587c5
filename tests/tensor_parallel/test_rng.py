"""Random streams are as many as there are names: equal names draw the same, all others independently."""

from __future__ import annotations

import os
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from megapipe.distributed.axis import CPU, Axis
from megapipe.distributed.layout import Layout, set_layout
from megapipe.tensor_parallel import rng
from megapipe.tensor_parallel.rng import MicrobatchContext, dropout, generator, initialize, stream_key


def test_no_two_of_a_million_streams_have_one_key_and_every_bit_of_the_keys_is_good():
    """A million with MEGAPIPE_NIGHTLY=1, else a fifth."""
    samples = 5000 if os.environ.get("MEGAPIPE_NIGHTLY") else 1000
    names = product([1234], range(samples), range(50), ("mlp_out", "attention_out", "attention", "embedding"))
    keys = np.fromiter((stream_key(*name) for name in names), np.uint64, count := 200 * samples)
    assert len(np.unique(keys)) == count
    equal = count * (count - 1) / 2 / 2**32  # of that many pairs; 116.4 of a million, of deviation 10.8
    for word in (keys & 0xFFFFFFFF, keys >> 32):
        assert count - len(np.unique(word)) == pytest.approx(equal, abs=6 * equal**0.5)
    for bit in range(64):
        assert np.mean(keys >> bit & 1) == pytest.approx(0.5, abs=3 * count**-0.5)


def test_a_name_cannot_be_spelled_in_two_ways():
    assert (
        len({stream_key(1, 23), stream_key(12, 3), stream_key("1", 23), stream_key("1, 23"), stream_key(1, "23")}) == 5
    )


def test_the_cpu_draws_from_a_mersenne_twister_whose_state_is_numpys_of_the_same_words():
    words = np.frombuffer(rng.shake_256(stream_key(1, "a").to_bytes(8)).digest(4 * 624), np.uint32)
    oracle = np.random.MT19937()
    oracle.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    expected = (oracle.random_raw(2000) & 0xFFFFFF) / 2**24
    assert torch.rand(2000, generator=generator(CPU, 1, "a")).tolist() == expected.tolist()


def test_first_numbers_of_neighbouring_streams_are_uniform_and_uncorrelated():
    first = np.array([torch.rand((), generator=generator(CPU, 1234, n)).item() for n in range(4096)])
    counts = np.histogram(first, 16, (0, 1))[0]
    assert ((counts - 256) ** 2 / 256).sum() < 45  # chi square of 15 degrees of freedom: p = 8e-5
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 5 / 64


def test_masks_of_all_pairs_of_samples_are_independent():
    # Samples 121 and 202 had one mask: their names had one Adler-32, all that a CPU read of the seed but one bit.
    samples, elements = 400, 512
    masks = []
    for sample in range(samples):
        with MicrobatchContext(1234, sample).active():
            masks.append(dropout(torch.ones(elements, 1), 0.5, 3, "mlp_out").flatten().numpy() - 1)  # -1 or 1
    correlations = np.array(masks) @ np.array(masks).T / elements
    np.fill_diagonal(correlations, 0)
    assert np.abs(correlations).max() < 6.5 / elements**0.5  # of 79,800 pairs


def test_initial_weights_of_256_layers_differ():
    # From 202 layers on some started equal in pairs: layers 120 and 201, 122 and 203.
    layers = nn.ModuleDict({f"layers{n}": nn.Linear(4, 4, bias=False) for n in range(256)})
    for param in layers.parameters():
        set_layout(param, Layout((4, 4), std=0.02))
    initialize(layers, 1234, Axis())
    assert len({tuple(param.flatten().tolist()) for param in layers.parameters()}) == 256


def test_threads_draw_the_same_initial_weights():
    layers = nn.ModuleDict({f"layers{n}": nn.Linear(64, 64, bias=False) for n in range(8)} | {"experts": _experts()})
    drawn = []
    for threads in (1, 3):
        for param in layers.parameters():
            set_layout(param, Layout(tuple(param.shape), std=0.02, experts=param.ndim == 3))
        initialize(layers, 1234, Axis(), threads)
        drawn.append([param.detach().clone() for param in layers.parameters()])
    assert all(map(torch.equal, *drawn))


def _experts() -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.empty(4, 8, 8, dtype=torch.bfloat16))])


@pytest.mark.parametrize("rows, tp", [(16, 2), (16, 8), (20, 4), (18, 3), (8, 8)])
def test_a_rank_draws_its_rows_of_the_mask_and_at_most_two_blocks_more(rows, tp, monkeypatch):
    drawn = []
    monkeypatch.setattr(rng, "generator", lambda *name: drawn.append(name) or generator(*name))
    monkeypatch.setattr(rng, "_BLOCK_ELEMENTS", 6)
    whole = dropout(torch.ones(rows, 2, 3), 0.5, "out")
    assert len(drawn) == len(set(drawn)) <= 8
    size = -(-rows // 8)
    for rank in range(tp):
        drawn.clear()
        part = dropout(torch.ones(rows // tp, 2, 3), 0.5, "out", tp=Axis(rank, tp), dim=0)
        assert torch.equal(part, whole.chunk(tp)[rank])
        assert len(drawn) * size < rows // tp + 2 * size
