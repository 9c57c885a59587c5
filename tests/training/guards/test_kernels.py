"""Ranks of machines with and without a C compiler or tiles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapipe.kernels import attention, available, cpu
from megapipe.training.guards.kernels import use_common


@pytest.mark.skipif(cpu.library() is None, reason="no C compiler here")
def test_what_a_rank_has_not_all_leave_out_and_the_user_reads_which() -> None:
    def mesh(*others: list[str]) -> Any:
        return SimpleNamespace(
            device=torch.device("cpu"), world=SimpleNamespace(gather_json=lambda own: [own, *others])
        )

    own = available.own()
    try:
        assert use_common(mesh(own, own)) == []
        assert cpu.library() is not None
        *_, line = use_common(mesh([], own, []))
        assert "all ranks compute without" in line
        assert "as ranks 1, 3 must: replicas would differ" in line
        assert cpu.library() is None
        assert attention.library() is None
        assert use_common(mesh()) == []  # the next run of this process
        assert cpu.library() is not None
    finally:
        available.leave_out(())
