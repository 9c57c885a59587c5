"""--use-checkpoint-args: the architecture comes from the checkpoint, the rest from the command line."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tiny import LLAMA

from megapipe.checkpoint import commit
from megapipe.checkpoint.save_load import load_checkpoint, save_checkpoint
from megapipe.checkpoint.saved_config import saved_config, with_checkpoint_args
from megapipe.config import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError, ConfigError
from megapipe.models.provider import gpt_provider
from megapipe.partition.spans import LayerSpan
from megapipe.tensor_parallel.rng import initialize

SAVED = Config(
    model=LLAMA, optimizer=OptimizerConfig(lr=0.1), data=DataConfig(tokenizer_type="NullTokenizer", vocab_size=60)
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    counters = {"consumed_train_samples": 0, "consumed_valid_samples": 0}
    save_checkpoint(tmp_path, 1, [whole(LLAMA)], None, counters, SAVED, ProcessMesh.single())
    return tmp_path


def whole(model: ModelConfig):
    module = gpt_provider(model, LayerSpan(0, model.layers, True, True), Axis())
    initialize(module, 1, Axis())
    return module


def flags(root: Path) -> Config:
    """Nothing of the architecture but what no weight depends on."""
    model = ModelConfig(attention_backend="unfused", init_method_std=0.1)
    return Config(model=model, checkpoint=CheckpointConfig(load=str(root), use_checkpoint_args=True, finetune=True))


def test_the_architecture_comes_from_the_checkpoint(root):
    config = with_checkpoint_args(flags(root))
    assert config.model == replace(LLAMA, attention_backend="unfused", init_method_std=0.1)
    load_checkpoint(root / "iter_0000001", [whole(config.model)], None, config, ProcessMesh.single())


def test_a_tool_that_reads_a_checkpoint_needs_no_transformer_engine(tmp_path):
    saved = replace(SAVED, model=replace(LLAMA, transformer_impl="transformer_engine"))
    (tmp_path / "state.json").write_text(json.dumps({"config": asdict(saved)}))
    assert saved_config(tmp_path).model == LLAMA


@pytest.mark.parametrize("given, want", [(None, "fp32"), ("fp64", "fp64")])
def test_the_router_computes_in_the_checkpoints_type_unless_a_flag_says_another(root, given, want):
    """A DeepSeek that comes from Hugging Face routes in float32, in a run that takes its arguments too."""
    state = root / "iter_0000001" / "state.json"
    state.write_text(state.read_text().replace('"moe_router_dtype": null', '"moe_router_dtype": "fp32"'))
    files = commit.read_manifest(state.parent)
    now = files | commit.digest(state.parent, ["state.json"])
    (state.parent / commit.MANIFEST).write_text(commit._manifest_text(1, now))
    mine = replace(flags(root), model=ModelConfig(moe_router_dtype=given))
    assert with_checkpoint_args(mine).model.moe_router_dtype == want


def test_without_the_flag_nothing_changes(root):
    config = replace(flags(root), checkpoint=CheckpointConfig(load=str(root)))
    assert with_checkpoint_args(config) is config


def test_the_first_run_of_a_script_that_resumes_takes_the_flags(tmp_path):
    config = Config(model=LLAMA, checkpoint=CheckpointConfig(load=str(tmp_path), use_checkpoint_args=True))
    assert with_checkpoint_args(config) is config


def test_without_load_there_is_nothing_to_take():
    with pytest.raises(ConfigError, match=r"^--use-checkpoint-args needs --load$"):
        with_checkpoint_args(Config(checkpoint=CheckpointConfig(use_checkpoint_args=True)))


def test_model_training_and_data_are_read_back(root):
    assert saved_config(root / "iter_0000001") == SAVED
    state = root / "iter_0000001" / "state.json"
    state.write_text(state.read_text().replace('"hidden_size": 32', '"hidden_size": 31'))
    with pytest.raises(CheckpointError, match=r"state.json is damaged: its SHA-256 differs from manifest.json"):
        saved_config(root / "iter_0000001")
    state.write_text("[]")
    with pytest.raises(CheckpointError, match=r"state.json is not the state of a run"):
        saved_config(root / "iter_0000001")


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_layers", "4"),
        ("norm_epsilon", None),
        ("hidden_size", {}),
        ("norm_epsilon", "x"),
        ("hidden_size", -16),
        ("num_layers", 10**9),
        ("hidden_size", None),
        ("swiglu", 1),
    ],
)
def test_a_value_that_its_field_never_has_is_no_state_of_a_run(tmp_path, field, value):
    saved = asdict(SAVED)
    saved["model"][field] = value
    (tmp_path / "state.json").write_text(json.dumps({"config": saved}))
    with pytest.raises(CheckpointError, match=r"state.json is not the state of a run"):
        saved_config(tmp_path)
