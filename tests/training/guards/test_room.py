"""A model without room for it is one sentence with what the plan says; any other error stays what it is."""

from __future__ import annotations

import pytest
import short_run
import torch
from tiny import STYLES

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.plan import GIB, make_plan
from megapipe.training.guards.model import fits, room


def test_a_model_that_no_memory_holds_is_refused_with_what_it_needs():
    mesh, plan = ProcessMesh.single(), make_plan(short_run.config(STYLES["gpt2"]))
    sentence = r"^rank 0 has no memory for its stages, which need .* GiB by the plan\. Use"
    with pytest.raises(ConfigError, match=sentence), room(mesh, plan):
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="shape"), room(mesh, plan):
        torch.zeros(2).view(3)


def test_the_memory_of_communicators_stands_beside_the_plans():
    """Ten, four of which are links: 6 x 32 + 4 x 2 blocks of 10 MiB."""
    said = "rank 3: 10 communicators of NCCL, 4 of them links, take about 2 GiB of its GPU's 80 beside the plan's"
    assert fits(77 * GIB, 10, 4, 80 * GIB, 3) == f" > {said} 77"
    assert fits(79 * GIB, 10, 4, 80 * GIB, 3).startswith(f"WARNING: {said} 79, more than there is: it may run out of")
