"""Times of a model's pieces, measured where it would run."""

from dataclasses import replace

import pytest
import torch
from tiny import STYLES

from megapipe.commands.plan.measure import measure
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


def test_tensor_parallel_times_are_refused():
    config = Config(parallel=ParallelConfig(tensor_model_parallel_size=2))
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size 2"):
        measure(config, pieces(STYLES["gpt2"], 12), gpt_provider, torch.device("cpu"))
