"""Which device a rank takes, on machines that are not here."""

from __future__ import annotations

import pytest
import torch

from megapipe.config import ParallelConfig
from megapipe.distributed.device import has_cuda, pick_device


@pytest.mark.parametrize(
    "gpus, ranks, kind", [(8, 8, "cuda"), (8, 2, "cuda"), (1, 2, "cpu"), (1, 1, "cuda"), (0, 2, "cpu")]
)
def test_ranks_take_gpus_where_each_has_one(monkeypatch, capsys, gpus, ranks, kind):
    """Two ranks on one GPU, as the first command of the README starts them, ended with `invalid device ordinal`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert has_cuda() == (kind == "cuda")
    assert pick_device(ParallelConfig()).type == kind
    assert ("WARNING: 2 ranks on a machine of 1 GPU(s)" in capsys.readouterr().out) == (gpus == 1 and ranks == 2)
    assert pick_device(ParallelConfig(distributed_backend="gloo")).type == "cpu"
