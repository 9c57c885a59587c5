"""What a user reads about layers that cannot multiply in eight bits."""

from dataclasses import replace

import pytest
import torch

from megapipe.checks.fp8 import fp8_problems
from megapipe.config import Config, ModelConfig, ParallelConfig, PrecisionConfig
from megapipe.distributed.device import require_fp8
from megapipe.errors import ConfigError
from megapipe.flags.idle import idle
from megapipe.flags.parse import parse
from megapipe.models.transformer_engine import choose_layers

MODEL = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=96, fp8_format="hybrid")


def problems(tp=1, **fields):
    parallel = ParallelConfig(tensor_model_parallel_size=tp)
    return list(fp8_problems(Config(model=replace(MODEL, **fields), parallel=parallel)))


def test_experts_and_latents_are_measured_too():
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 24, "ffn_hidden_size": 100}
    assert [line.split("and --")[1].split()[:2] for line in problems(**experts)] == [["moe-ffn-hidden-size", "24"]]
    latent = {"multi_latent_attention": True, "kv_lora_rank": 40, "qk_head_dim": 24}
    names = [line.split("and --")[1].split()[0] for line in problems(**latent)]
    assert names == ["kv-lora-rank", "qk-head-dim"]
    assert problems() == []


def test_flags_that_fp8_does_not_read_are_idle():
    assert idle(parse(Config, ["--fp8-recipe", "mxfp8"])) == [
        ("--fp8-recipe mxfp8", "products have the type of the weights, without --fp8-format")
    ]
    given = ["--fp8-format", "e4m3", "--fp8-recipe", "tensorwise", "--fp8-amax-history-len", "16"]
    assert idle(parse(Config, given)) == [
        ("--fp8-amax-history-len 16", "scales follow from the step itself, without --fp8-recipe delayed")
    ]
    assert parse(Config, ["--disable-fp8-wgrad"]).model.no_fp8_wgrad


def test_a_gpu_without_fp8_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(ConfigError) as caught:
        require_fp8(torch.device("cuda", 0), "hybrid")
    assert str(caught.value).endswith(
        "--fp8-format hybrid needs a GPU of compute capability 8.9 or more, and NVIDIA A100-SXM4-80GB has 8.0. "
        "Leave it out."
    )
    require_fp8(torch.device("cuda", 0), None)
    require_fp8(torch.device("cpu"), "hybrid")


@pytest.mark.parametrize(
    "recipe, on_gpu, text",
    [
        ("tensorwise", False, "rounded to it and multiplied in float32)"),
        ("tensorwise", True, "tensorwise), by torch's scaled products"),
        ("blockwise", True, "rounded to it and multiplied in bf16, without its speed)"),
    ],
)
def test_the_line_at_start_says_how_products_are_computed(recipe, on_gpu, text):
    config = Config(model=replace(MODEL, fp8_recipe=recipe), precision=PrecisionConfig(bf16=True))
    said = choose_layers(config, on_gpu)[1]
    assert said.startswith(f"layers of plain torch (local), products of linear layers in FP8 (hybrid, {recipe}")
    assert said.endswith(text)


def test_layers_of_plain_torch_name_no_layer_that_is_not():
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    model = replace(MODEL, fp8_format=None, transformer_impl="local", sequence_parallel=True, tp_comm_overlap=True)
    assert choose_layers(Config(model=model, parallel=parallel), False) == ("local", "layers of plain torch (local)")


@pytest.mark.parametrize("half, why", [(False, "float32 products to TF32"), (True, "Transformer Engine")])
def test_layers_are_of_plain_torch_in_float32_and_where_there_is_no_other(half, why, monkeypatch):
    """--transformer-impl auto on a GPU: without 16 bits it does not even ask for Transformer Engine."""
    asked = []

    def load():
        asked.append(half)
        raise ConfigError("Transformer Engine is not here")

    monkeypatch.setattr(f"{choose_layers.__module__}.load", load)
    model = replace(MODEL, fp8_format=None, transformer_impl="auto")
    config = Config(model=model, precision=PrecisionConfig(bf16=half))
    impl, text = choose_layers(config, True)
    assert impl == "local"
    assert why in text
    assert asked == [True] * half


def test_a_run_whose_weights_travel_in_eight_bits_says_so():
    model = replace(MODEL, fp8_param_gather=True)
    parallel = ParallelConfig(use_distributed_optimizer=True)
    precision = PrecisionConfig(bf16=True)
    config = Config(model=model, parallel=parallel, precision=precision, world_size=2)
    assert "in FP8 (hybrid, delayed, weights gathered so: rounded" in choose_layers(config, False)[1]
    assert replace(config, world_size=1).settled(model).model.fp8_param_gather is False
