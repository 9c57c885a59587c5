"""Times of a model's pieces, measured where it would run."""

from dataclasses import replace

import pytest
import torch
from tiny import STYLES

from megapipe.commands.plan.measure import measure
from megapipe.commands.plan.parts import parts
from megapipe.config import Config, ParallelConfig, TrainConfig
from megapipe.distributed.axis import CPU
from megapipe.errors import ConfigError
from megapipe.models.provider import gpt_provider
from megapipe.plan import pieces

WIDE = '{"1": {"ffn_hidden_size": 16384}, "3": {"no_mlp": true, "no_attention": true}}'


@pytest.mark.parametrize("style", STYLES)
def test_a_layer_of_more_work_takes_longer_and_one_without_any_least(style):
    model = replace(STYLES[style], per_layer_overrides=WIDE)
    config = Config(model=model, train=TrainConfig(micro_batch_size=2, seq_length=12))
    counted = pieces(model, 12, 2, modules=("core_attn",))
    found = measure(config, counted, gpt_provider, CPU)
    usual, wide, like_usual, nothing = found.layers
    assert usual is like_usual
    assert wide.time > usual.time > nothing.time
    assert wide.w > usual.w
    assert found.head.time > 0
    assert 0 < (found.copied_byte or 0) < 1e-3, "seconds of a byte to the host, and no FLOPs"
    assert found.costs((4,)).mem_o == counted.costs((4,)).mem_o
    assert [layer.parameters for layer in found.layers] == [layer.parameters for layer in counted.layers]


@pytest.mark.parametrize("axis", ["tensor_model_parallel_size", "context_parallel_size"])
def test_times_of_a_rank_among_others_are_refused(axis):
    """Under context parallelism whole sequences were timed, where FLOPs and bytes are of a rank's tokens."""
    config = Config(parallel=ParallelConfig(**{axis: 2}))
    with pytest.raises(ConfigError, match=f"--{axis.replace('_', '-')} 2"):
        measure(config, pieces(STYLES["gpt2"], 12), gpt_provider, torch.device("cpu"))


@pytest.mark.parametrize(
    "frequency, rows", [("1", {"router and experts": 4, "predicts 1 further": 1}), ("[1,1,1,0]", {})]
)
def test_parts_send_the_rows_of_both_ways_and_a_dense_depth_sends_none(frequency, rows):
    """The largest collective was added once more, and a depth sent whatever its layer was."""
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_token_dispatcher_type": "alltoall"}
    model = replace(STYLES["llama"], **experts, moe_layer_freq=frequency, mtp_num_layers=1, num_layers=4)
    par = ParallelConfig(expert_model_parallel_size=2)
    config = Config(model=model, parallel=par, train=TrainConfig(micro_batch_size=1, seq_length=12))
    away = 12 * model.moe_router_topk / 2  # half of the experts are on the other rank
    layer = 2 * away * (2 * 4 * model.hidden + 4)  # there and back with a weight, in forward and in backward
    sent = {part.name: part.sent for part in parts(config) if part.sent}
    assert sent == {name: count * layer for name, count in (rows or {"router and experts": 3}).items()}
