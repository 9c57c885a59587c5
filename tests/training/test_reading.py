"""Which ranks of a pipeline look at tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_plans import config

from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.plan import make_plan
from megapipe.training.reading import Reading


@pytest.mark.parametrize(
    "flags, also, ranks",
    [
        ("", (), [0, 3]),
        ("", (2,), [0, 2, 3]),
        ("--reset-position-ids", (), [0, 1, 2, 3]),
        ("--vocab-parallel-pipeline", (), [0, 1, 2, 3]),  # each has a share of the embedding and of the head
    ],
)
def test_the_ends_look_at_tokens_and_whoever_has_a_share_of_their_work(flags, also, ranks):
    given = config(f"--num-layers 8 --pipeline-model-parallel-size 4 {flags}", 4)
    place = make_plan(given).schedule.placement
    meshes = [replace(ProcessMesh.single(), pp=Axis(rank=rank, size=4)) for rank in range(4)]
    assert [rank for rank, mesh in enumerate(meshes) if Reading(given, mesh, place, also).looks] == ranks
