"""A model by its kinds of parts."""

from dataclasses import replace

import pytest
from tiny import STYLES

from megapipe.commands.plan.parts import parts
from megapipe.config import BatchConfig, Config, ParallelConfig


@pytest.mark.parametrize(
    "frequency, rows", [("1", {"router and experts": 4, "predicts 1 further": 1}), ("[1,1,1,0]", {})]
)
def test_parts_send_the_rows_of_both_ways_and_a_dense_depth_sends_none(frequency, rows):
    """The largest collective was added once more, and a depth sent whatever its layer was."""
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_token_dispatcher_type": "alltoall"}
    model = replace(STYLES["llama"], **experts, moe_layer_freq=frequency, mtp_num_layers=1, num_layers=4)
    par = ParallelConfig(expert_model_parallel_size=2)
    config = Config(model=model, parallel=par, batch=BatchConfig(micro_batch_size=1, seq_length=12))
    away = 12 * model.moe_router_topk / 2  # half of the experts are on the other rank
    layer = 2 * away * (2 * 4 * model.hidden + 4)  # there and back with a weight, in forward and in backward
    sent = {part.name: part.sent for part in parts(config) if part.sent}
    assert sent == {name: count * layer for name, count in (rows or {"router and experts": 3}).items()}
