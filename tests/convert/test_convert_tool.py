"""What cannot be converted and how that is said; the tool, and a run that starts from an import."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import tokenizers
import torch
from programs import run, run_ranks
from random_models import refused, saved, theirs, transformers
from safetensors.torch import load_file, save_file

from megapipe.checkpoint import commit
from megapipe.checkpoint.resume import resume_problems
from megapipe.commands import convert, generate
from megapipe.config import Config, ModelConfig
from megapipe.convert import export_checkpoint, import_checkpoint
from megapipe.convert.huggingface.families import to_huggingface
from megapipe.data.build import build_datasets
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.errors import CheckpointError, ConfigError
from megapipe.flags.parse import parse


def test_a_missing_and_a_left_over_tensor_are_named_and_nothing_is_written(tmp_path):
    saved("llama", 0, tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.gate.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")
    save_file(tensors, path)
    assert refused(lambda: import_checkpoint(tmp_path / "hf", tmp_path / "ours")) == (
        f"{tmp_path}/hf: config.json asks for tensors that are missing: model.layers.0.mlp.gate_proj.weight",
        f"{tmp_path}/hf: tensors that config.json knows nothing of: model.layers.0.mlp.gate.weight",
    )
    assert not (tmp_path / "ours").exists()


def test_a_tensor_of_another_shape_is_named(tmp_path):
    saved("gpt2", 0, tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"][:20].clone()
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"][:100].clone()
    save_file(tensors, path)
    width = tensors["transformer.wpe.weight"].shape[1]
    assert refused(lambda: import_checkpoint(tmp_path / "hf", tmp_path / "ours")) == (
        f"transformer.wte.weight is [100, {width}], but config.json means [101, {width}]",
        f"transformer.wpe.weight is [20, {width}], but config.json means [24, {width}]",
    )


@pytest.mark.parametrize(
    "change, line",
    [
        ({"hidden_act": "gelu"}, "config.json: hidden_act is gelu; only silu can be converted"),
        (
            {"rope_parameters": None, "rope_theta": None},
            "config.json: rope_theta is null; it has to be the base of the rotation, as 10000",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "config.json of a llama lacks 'factor'"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "config.json: rope_type longrope is not default, llama3, yarn or linear",
        ),
        (
            {"model_type": "bloom"},
            "config.json: model_type bloom cannot be converted: there is nothing here for ALiBi positions. The nearest "
            "family is gpt2",
        ),
    ],
)
def test_what_we_cannot_express_is_refused(tmp_path, change, line):
    saved("llama", 0, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert refused(lambda: import_checkpoint(tmp_path / "hf", tmp_path / "ours")) == (line,)


def test_a_model_that_no_family_has_is_not_exported(tmp_path):
    saved("llama", 0, tmp_path / "hf")
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours")
    state = done.folder / "state.json"
    state.write_text(state.read_text().replace('"apply_layernorm_1p": false', '"apply_layernorm_1p": true'))
    files = commit.read_manifest(done.folder)
    (done.folder / commit.MANIFEST).write_text(
        commit._manifest_text(0, files | commit.digest(done.folder, ["state.json"]))
    )
    (tmp_path / "ours" / "huggingface" / "config.json").unlink()
    assert refused(lambda: export_checkpoint(done.folder, tmp_path / "back")) == (
        "no family of Hugging Face models is like this one; nearest is llama:",
        "--apply-layernorm-1p is True, but llama has False",
    )


def test_the_tool_imports_and_exports_and_compares(tmp_path):
    saved("qwen2", 0, tmp_path / "hf")
    tool = ["tools/convert_checkpoint.py"]
    inward = [*tool, "--from-huggingface", str(tmp_path / "hf"), "--save", str(tmp_path / "ours")]
    done = run(inward)
    assert done.returncode == 0, done.stderr
    assert "logits of both models differ by at most" in done.stdout
    assert "--add-qkv-bias" in done.stdout
    outward = [*tool, "--load", str(tmp_path / "ours"), "--to-huggingface", str(tmp_path / "back"), "--no-check"]
    done = run(outward)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(theirs(tmp_path / "back"), theirs(tmp_path / "hf"), atol=0, rtol=0)
    assert refused(lambda: export_checkpoint(tmp_path / "ours" / "iter_0000000", tmp_path / "back")) == (
        f"{tmp_path}/back is not empty; give another folder",
    )


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            "--to-megatron {0}/out --target-tensor-parallel-size 2",
            "--target-tensor- and --target-pipeline-parallel-size and --transformer-impl are for --ckpt-format torch: "
            "a run of any sizes loads torch_dist. Add it, or leave them out.",
        ),
        (
            "--to-huggingface {0}/out --target-expert-parallel-size 2",
            "--target-expert-parallel-size 2 has no effect with --to-huggingface: it is for --to-megatron. "
            "Leave it out.",
        ),
        (
            "--to-megatron {0}/out --huggingface-config {0}/nowhere",
            "--huggingface-config {0}/nowhere has no effect with --to-megatron: it is for --to-huggingface. "
            "Leave it out.",
        ),
        (
            "--to-megatron {0}/out --dtype bfloat16",
            "--dtype bfloat16 has no effect with --to-megatron: it is for --from-huggingface and --to-huggingface. "
            "Leave it out.",
        ),
        ("--to-huggingface {0}/out --vocab-size 0", "--vocab-size 0 must be at least 1"),
    ],
)
def test_flags_of_another_direction_and_values_that_are_none_are_refused(tmp_path, flags, line):
    with pytest.raises(ConfigError) as caught:
        convert.main(["--load", str(tmp_path), *flags.format(tmp_path).split()])
    assert caught.value.problems == (line.format(tmp_path),)


@pytest.mark.parametrize(
    "direction, idle",
    [
        ("--from-huggingface", ["--ckpt-step 1", "--vocab-size 5", "--megatron-adam fused", "--ckpt-format torch"]),
        ("--from-megatron", ["--dtype bfloat16", "--make-vocab-size-divisible-by 8", "--vocab-size 5"]),
        ("--to-huggingface", ["--make-vocab-size-divisible-by 8", "--megatron-adam torch", "--ckpt-format torch"]),
        ("--to-megatron", ["--vocab-size 5", "--make-vocab-size-divisible-by 8", "--dtype float32"]),
    ],
)
def test_every_flag_that_a_direction_does_not_read_is_named(tmp_path, direction, idle):
    """--from-megatron --dtype bfloat16 wrote float32 and exited with 0."""
    inward = direction.startswith("--from")
    folders = [direction, str(tmp_path), "--save", str(tmp_path / "new")]
    if not inward:
        folders = ["--load", str(tmp_path), direction, str(tmp_path / "new")]
    with pytest.raises(ConfigError) as caught:
        convert.main([*folders, *" ".join(idle).split()])
    told = [line.partition(" has no effect with ")[0] for line in caught.value.problems]
    assert sorted(told) == sorted(idle)


LAUNCH = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --micro-batch-size 2 "
    "--global-batch-size 4 --seq-length 16 --train-iters 1 --lr 1e-2 --log-interval 1 --eval-iters 0 --mock-data "
    "--split 1,0,99 "
    "--tokenizer-type NullTokenizer --vocab-size 101"
)


def test_four_processes_train_an_import_at_tp_2_and_pp_2_without_flags_of_the_model(tmp_path):
    """The first loss is the one that transformers computes on the same tokens."""
    saved("qwen3", 0, tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "ours", divisible_by=8)
    load = ["--load", str(tmp_path / "ours"), "--finetune", "--use-checkpoint-args"]
    output = run_ranks(4, ["pretrain_gpt.py", *load, *LAUNCH.split()])
    (loss,) = re.findall(r"lm loss: (\S+)", output)

    config = parse(Config, LAUNCH.split())
    data = build_datasets(config, build_tokenizer(config.data)).train
    tokens = torch.stack([torch.from_numpy(data[i]) for i in range(4)])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").float()
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    # Padding adds to the denominator, at most its share.
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert 0 <= float(loss) - want <= math.log(104 / 101)


GPT = ModelConfig(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    max_position_embeddings=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


@pytest.mark.parametrize(
    "idle", [{"add_qkv_bias": True}, {"rotary_base": 5e5, "rotary_percent": 0.5}, {"rope_scaling_factor": 32.0}]
)
def test_a_setting_that_does_nothing_in_a_model_keeps_it_from_no_family(idle):
    """Megatron-LM sets add_qkv_bias in every model with biases, and its GPT-2 was refused."""
    assert to_huggingface(replace(GPT, **idle), 16) == to_huggingface(GPT, 16)
    one_layer = '{"1": {"disable_bias_linear": true, "position_embedding_type": "rope", "use_rope_scaling": true}}'
    model = replace(GPT, per_layer_overrides=one_layer)
    assert resume_problems(vars(model), None, Config(model=replace(model, **idle)), "it")


@pytest.mark.parametrize("files", ["tokenizer.json", "vocab.json merges.txt"])
def test_an_import_takes_the_tokenizer_of_its_folder(tmp_path, files, capsys):
    """It took tokenizer.model alone: what came from Qwen or GPT-2 could not be prompted with text."""
    saved("gpt2", 1, tmp_path / "hf")
    library = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    library.train_from_iterator(["hello " * 9], vocab_size=257, special_tokens=["<|endoftext|>"], show_progress=False)
    library.save(str(tmp_path / "tokenizer.json"))
    library.save_model(str(tmp_path))
    (tmp_path / "hf" / "tokenizer.model").write_text("of another kind")
    for name in files.split():
        (tmp_path / name).rename(tmp_path / "hf" / name)
    done = import_checkpoint(tmp_path / "hf", tmp_path / "small")
    assert any(note.endswith("it has 257 ids, and the embedding 128 rows") for note in done.notes)
    assert any(note.startswith("no tokenizer is made of tokenizer.model: ") for note in done.notes)
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours", divisible_by=300)
    assert build_tokenizer(done.config.data).encode("hello") == library.encode("hello").ids
    generate.main(["--load", str(tmp_path / "ours"), "--prompt", "hello", "--num-tokens", "2"])
    assert "\nhello" in capsys.readouterr().out


def test_an_import_that_a_full_disk_ends_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    saved("gpt2", 1, tmp_path / "hf")
    monkeypatch.setattr("megapipe.convert.tensors.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("rows", [2**44, 2**62])
def test_padding_that_no_machine_holds_is_refused_in_a_line(tmp_path, rows):
    """It was a traceback of torch's allocator (found by drawn command lines)."""
    saved("llama", 0, tmp_path / "hf")
    flags = ["--from-huggingface", tmp_path / "hf", "--save", tmp_path / "o", "--make-vocab-size-divisible-by", rows]
    with pytest.raises(CheckpointError, match=f"no memory for the model's tensors.*less than .*-by {rows}"):
        convert.main([*map(str, flags)])
