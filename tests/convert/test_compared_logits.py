"""The comparison at a conversion's end: it finds another model, and only that."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from random_models import refused, saved
from safetensors.torch import load_file, save_file
from tiny import LLAMA

from megapipe.checkpoint.save_load import save_checkpoint
from megapipe.checkpoint.saved_config import saved_config
from megapipe.commands import convert, generate
from megapipe.config import Config, DataConfig, ModelConfig, OptimizerConfig
from megapipe.convert import export_checkpoint
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError
from megapipe.models.provider import gpt_provider
from megapipe.partition.spans import LayerSpan
from megapipe.tensor_parallel.rng import initialize

SPARSE = replace(LLAMA, num_experts=4, moe_ffn_hidden_size=16, qk_layernorm=True, moe_router_dtype="fp32")


def checkpoint(folder, model: ModelConfig):
    """A checkpoint of a training of this model, with large weights so that its logits differ."""
    plain = replace(model, attention_backend="auto")
    module = gpt_provider(plain, LayerSpan(0, model.layers, True, True), Axis())
    initialize(module, 1, Axis())
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
    data = DataConfig(tokenizer_type="NullTokenizer", vocab_size=60)
    counters = {"consumed_train_samples": 0, "consumed_valid_samples": 0}
    config = Config(model=model, optimizer=OptimizerConfig(lr=0.1), data=data)
    return save_checkpoint(folder / "ours", 1, [module], None, counters, config, ProcessMesh.single())


def test_weights_that_are_rounded_on_the_way_out_are_the_same_model(tmp_path, capsys):
    """--dtype bfloat16 ended in `they are not the same model`: rounding moved logits by 0.029 of 2.53."""
    folder = checkpoint(tmp_path, LLAMA)
    out = ["--load", str(folder.parent), "--to-huggingface", str(tmp_path / "hf"), "--vocab-size", "64"]
    convert.main([*out, "--dtype", "bfloat16"])
    assert "logits of both models differ by at most" in capsys.readouterr().out
    assert {x.dtype for x in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_weights_that_are_rounded_on_the_way_in_are_the_same_model(tmp_path, family):
    saved(family, 0, tmp_path / "hf")
    convert.main(["--from-huggingface", str(tmp_path / "hf"), "--save", str(tmp_path / "ours"), "--dtype", "bfloat16"])


def test_rounding_does_not_hide_another_model(tmp_path):
    saved("qwen2", 0, tmp_path / "hf")
    into = ["--from-huggingface", str(tmp_path / "hf"), "--save", str(tmp_path / "ours"), "--dtype", "bfloat16"]
    convert.main([*into, "--no-check"])
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_proj.weight"] *= 1.1
    save_file(tensors, path, metadata={"format": "pt"})
    folder = tmp_path / "ours" / "iter_0000000"
    done = convert.Converted(folder, saved_config(folder), (), 101, dtype=torch.bfloat16)
    (line,) = refused(lambda: convert.check(tmp_path / "hf", folder, done))
    assert "they are not the same model" in line


@pytest.mark.parametrize(
    "setting",
    [
        {"moe_expert_capacity_factor": 1.0},
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {"moe_router_force_load_balancing": True},
    ],
)
def test_a_training_that_drops_tokens_exports_the_model_that_drops_none(tmp_path, setting, capsys):
    """Ours dropped tokens in the comparison and theirs cannot: 0.62 off of 1.85, exit 2."""
    folder = checkpoint(tmp_path, replace(SPARSE, **setting))
    convert.main(["--load", str(folder.parent), "--to-huggingface", str(tmp_path / "hf"), "--vocab-size", "64"])
    said = capsys.readouterr().out
    assert "logits of both models differ by at most" in said
    assert ("experts take every token there" in said) == ("moe_expert_capacity_factor" in setting)


@pytest.mark.parametrize("k", [1, 2])
def test_sinkhorn_is_refused_on_the_way_out(tmp_path, k):
    """Its weights are a softmax over all experts or a sigmoid: logits were 0.23 off of 1.9 under --no-check."""
    folder = checkpoint(tmp_path, replace(SPARSE, moe_router_load_balancing_type=("sinkhorn",), moe_router_topk=k))
    (line,) = refused(lambda: export_checkpoint(folder, tmp_path / "hf", vocab_size=64))
    assert line.startswith("--moe-router-load-balancing-type sinkhorn has a rule of its own")
    assert not (tmp_path / "hf").exists()


def test_more_ids_than_the_embedding_has_rows_are_refused(tmp_path):
    """The folder was written, and transformers could not load it: a traceback."""
    folder = checkpoint(tmp_path, LLAMA)
    assert refused(lambda: export_checkpoint(folder, tmp_path / "hf", vocab_size=500)) == (
        "500 ids (--vocab-size, config.json or the tokenizer) are more than the 64 rows of the embedding of "
        "iter_0000001. Use --vocab-size 64, or fewer.",
    )
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("backend", ["fused", "flash"])
def test_a_training_with_kernels_of_a_gpu_is_read_on_a_cpu(tmp_path, backend, capsys):
    """`No viable backend for scaled_dot_product_attention`, of both programs, which have no flag for it."""
    folder = checkpoint(tmp_path, replace(LLAMA, attention_backend=backend))
    generate.main(["--load", str(folder.parent), "--prompt", "1 2", "--num-tokens", "2"])
    convert.main(["--load", str(folder.parent), "--to-huggingface", str(tmp_path / "hf"), "--vocab-size", "64"])
    assert "logits of both models differ by at most" in capsys.readouterr().out


def test_a_folder_that_transformers_cannot_load_is_no_traceback(tmp_path):
    saved("llama", 0, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": "x"}))
    with pytest.raises(CheckpointError, match="transformers cannot load it"):
        convert.main(["--from-huggingface", str(tmp_path / "hf"), "--save", str(tmp_path / "ours")])
