"""Tables of published runs, against what their papers print."""

from __future__ import annotations

import pytest

from tools.bench.published.__main__ import config_of
from tools.bench.published.pairs import pairs


def test_zero_bubble_s_samples_per_second_become_seconds_of_a_step():
    """6.2B, 24 microbatches of 3 sequences on 8 ranks: 3.50 samples per device and second under 1F1B, 4.01 and 3.88."""
    found = [(one, other) for _, one, other in pairs() if one.name == "6.2B, 24"]
    (plain, interleaved), (_, split) = found
    assert plain.seconds == pytest.approx(24 * 3 / (3.50 * 8))
    assert plain.seconds / interleaved.seconds == pytest.approx(4.01 / 3.50)
    assert plain.seconds / split.seconds == pytest.approx(3.88 / 3.50)
    config = config_of(interleaved)
    assert (config.num_microbatches, config.batch.sequence, config.world_size) == (24, 1024, 8)
    # 30 layers, the embedding and the head are one to each of 8 x 4 stages.
    assert config.parallel.num_virtual_stages_per_pipeline_rank == 4


def test_every_published_pair_is_one_model_batch_and_machine():
    """4 with another recomputation, 4 models x 3 batches x 2 schedules, and 4 with unfolded experts."""
    kinds = []
    for what, one, other in pairs():
        kinds.append(what)
        before, after = config_of(one), config_of(other)
        assert (one.device, one.gpus) == (other.device, other.gpus)
        assert before.global_batch_size == after.global_batch_size
        assert before.batch.sequence == after.batch.sequence
        assert (before.model.layers, before.model.hidden) == (after.model.layers, after.model.hidden)
        assert before.model.num_experts == after.model.num_experts
        assert before.parallel != after.parallel or before.model != after.model
    assert {what: kinds.count(what) for what in kinds} == {
        "recomputation": 4,
        "schedule": 24,
        "tensor, pipeline, experts": 4,
    }
