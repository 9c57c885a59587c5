"""Checkpoints of runs with weights in shards: each tensor is what a run without shards has, and loads."""

from dataclasses import replace
from functools import partial

import pytest
import saved_runs
from saved_runs import SHARDED
from tiny import GPT2

TWO = (2, 2, 1)


@pytest.mark.parametrize("parallel", [{}, SHARDED])
@pytest.mark.parametrize("frozen", [True, False])
def test_all_uses_of_a_weight_are_read_on_a_rank_without_its_owner(pool, tmp_path, parallel, frozen):
    """Of a frozen embedding only one of the last rank's uses was: head, and both ends of a depth."""
    model = replace(GPT2, mtp_num_layers=1)
    pool.run(partial(saved_runs.trained, save=str(tmp_path)), [TWO], model, {}, 2, {})
    assert pool.run(saved_runs.wrong_uses, [TWO], tmp_path, model, parallel, frozen) == [[]] * 4
