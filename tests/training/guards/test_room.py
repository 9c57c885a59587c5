"""A model without room for it is one sentence with what the plan says; any other error stays what it is."""

from __future__ import annotations

import pytest
import short_run
import torch
from tiny import STYLES

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.plan import make_plan
from megapipe.training.guards.model import room


def test_a_model_that_no_memory_holds_is_refused_with_what_it_needs():
    mesh, plan = ProcessMesh.single(), make_plan(short_run.config(STYLES["gpt2"]))
    sentence = r"^rank 0 has no memory for its stages, which need .* GiB by the plan\. Use"
    with pytest.raises(ConfigError, match=sentence), room(mesh, plan):
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="shape"), room(mesh, plan):
        torch.zeros(2).view(3)
