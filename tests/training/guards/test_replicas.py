"""Replicas that come apart in training are found and named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megapipe.distributed.layout import Layout, set_layout
from megapipe.errors import RanksDiffer
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.training.guards.replicas import check_replicas, hashes


@pytest.mark.parametrize("flipped", [False, True])
def test_one_changed_bit_on_one_data_parallel_rank_is_found(flipped):
    """As --check-weight-hash-across-dp-replicas-interval asks."""

    def body(mesh):
        layer = nn.Linear(3, 3)
        with torch.no_grad():
            layer.weight.fill_(0.5)
            layer.bias.zero_()
            if flipped and mesh.dp.rank == 1:
                layer.bias[2] = 1e-45  # the last bit of a zero
        check_replicas([layer], mesh, mirrored=False, after=7)

    if not flipped:
        run_threads(body, dp=2)
        return
    with pytest.raises(RanksDiffer, match=r"differ after iteration 7:\n +bias on data-parallel ranks 0 and 1\n"):
        run_threads(body, dp=2)


def test_experts_that_differ_are_of_the_ranks_with_the_same_experts():
    """Two ranks have the first two of four experts, two the others: the third rank's are another's copy."""
    layout = Layout((4, 3), experts=True)

    def body(mesh):
        layer = nn.Linear(3, 2, bias=False)
        set_layout(layer.weight, layout)
        with torch.no_grad():
            layer.weight.fill_(1.0 + mesh.ep.rank + 4.0 * (mesh.world.rank == 2))
        check_replicas([layer], mesh, mirrored=False, after=7)

    with pytest.raises(RanksDiffer, match=r"weight on expert-data-parallel ranks 0 and 2\n") as caught:
        run_threads(body, dp=4, ep=2)
    assert "weight on data-parallel" not in str(caught.value)


@pytest.mark.parametrize("layers, more", [(20, ""), (21, "and 1 more"), (25, "and 5 more")])
def test_twenty_names_are_shown_and_the_others_counted(layers, more):
    def body(mesh):
        module = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(layers))
        with torch.no_grad():
            for layer in module:
                layer.weight.fill_(mesh.dp.rank)
        check_replicas([module], mesh, mirrored=False, after=1)

    with pytest.raises(RanksDiffer) as caught:
        run_threads(body, dp=2)
    assert str(caught.value).count("weight on data-parallel ranks") == 20
    assert (f"\n      {more}" if more else "") in str(caught.value)
    assert (" more" in str(caught.value)) == bool(more)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8], ids=str)
def test_hashes_are_equal_where_all_bits_are_and_tell_any_two_flipped_ones(dtype):
    dice = torch.Generator().manual_seed(1)
    whole = torch.randint(0, 256, (40_003 * dtype.itemsize,), dtype=torch.uint8, generator=dice).view(dtype)

    def hash_of(data: torch.Tensor) -> str:
        return hashes({"x": data}, torch.device("cpu"))["x"]

    part = whole[1:20_001]  # begins in the middle of a word
    assert hash_of(part) == hash_of(part.clone()) != hash_of(whole[2:20_002])
    seen = {hash_of(whole)}
    for draw in range(200):
        other = whole.clone()
        for place in torch.randint(0, other.numel() * dtype.itemsize, (1 + draw % 2,), generator=dice).tolist():
            other.view(torch.uint8)[place] ^= 128  # of the last byte of a word the sign
        seen.add(hash_of(other))
    assert len(seen) == 201
