"""A model by its kinds of parts."""

from dataclasses import replace

import pytest
from tiny import STYLES

from megapipe.commands.plan.parts import parts
from megapipe.config import BatchConfig, Config, ParallelConfig
from megapipe.distributed.axis import Axis
from megapipe.models.gpt import GPTModel
from megapipe.partition.spans import LayerSpan


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


@pytest.mark.parametrize("tied", [True, False])
def test_a_weight_that_embedding_and_head_share_is_counted_once(tied):
    """The parts of a tied Llama of 3.2 billion parameters added up to 3.6."""
    model = replace(STYLES["llama"], untie_embeddings_and_output_weights=not tied, padded_vocab_size=128)
    config = Config(model=model, batch=BatchConfig(micro_batch_size=1, seq_length=12))
    built = GPTModel(model, LayerSpan(0, model.layers, True, True), Axis())
    # A stage is built with both weights, and a run then makes them one.
    once = sum(x.numel() for x in built.parameters()) - tied * 128 * model.hidden
    assert sum(part.work.parameters for part in parts(config)) == once
