"""Replicas that come apart in training are found and named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megapipe.errors import RanksDiffer
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.training.guards.replicas import check_replicas


@pytest.mark.parametrize("flipped", [False, True])
def test_one_changed_bit_on_one_data_parallel_rank_is_found(flipped):
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
