"""Random models of the transformers library, to our checkpoints and back: the same logits on both sides."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megapipe.cli import parse, to_flags
from megapipe.config import CheckpointConfig, Config, DataConfig, ModelConfig, TrainConfig
from megapipe.convert import SavedTensors, export_checkpoint, import_checkpoint, load_full
from megapipe.data.build import build_datasets
from megapipe.data.tokenizer import build_tokenizer
from megapipe.errors import CheckpointError
from megapipe.mesh import ProcessMesh
from megapipe.models.provider import gpt_provider
from megapipe.pipeline_parallel.forward_backward import get_forward_backward_func
from megapipe.pipeline_parallel.partition import partition
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build
from megapipe.training import commit
from megapipe.training.pretrain import Run
from pretrain_gpt import forward_step

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
TOKENS = torch.randint(0, 101, (2, 10), generator=torch.Generator().manual_seed(3))
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rotary(draw: random.Random) -> dict[str, Any]:
    """A size that Llama, Qwen2 and Qwen3 understand; two layers and tensor-parallel ranks must be possible."""
    heads = draw.choice([2, 4, 6])
    rope = {"rope_type": "default"} if draw.random() < 0.5 else LLAMA3 | {"original_max_position_embeddings": 8192}
    return {
        "hidden_size": heads * draw.choice([8, 10]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([2, heads]),
        "num_hidden_layers": draw.choice([2, 4]),
        "intermediate_size": draw.choice([24, 40]),
        "max_position_embeddings": 24,
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": rope | {"rope_theta": draw.choice([1e4, 5e5])},
        "vocab_size": 101,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def gpt2(draw: random.Random) -> Any:
    heads = draw.choice([2, 4, 6])
    return transformers.GPT2Config(
        n_embd=8 * heads,
        n_head=heads,
        n_layer=draw.choice([2, 4]),
        n_inner=draw.choice([None, 24]),
        n_positions=24,
        vocab_size=101,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )


def llama(draw: random.Random) -> Any:
    bias = draw.random() < 0.5
    return transformers.LlamaConfig(**rotary(draw), attention_bias=bias, mlp_bias=bias)


def qwen2(draw: random.Random) -> Any:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0} if draw.random() < 0.5 else {}
    return transformers.Qwen2Config(**rotary(draw), **window)


def qwen3(draw: random.Random) -> Any:
    return transformers.Qwen3Config(**rotary(draw), head_dim=draw.choice([6, 12]))


FAMILIES = {"gpt2": gpt2, "llama": llama, "qwen2": qwen2, "qwen3": qwen3}
CASES = [(family, seed) for family in FAMILIES for seed in range(3)]


def saved(family: str, seed: int, folder: Path, **kwargs: Any) -> Tensor:
    """A model of transformers with every parameter at random, saved; its logits [2, s, v]."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](random.Random(f"{family}{seed}"))).eval()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
    model.save_pretrained(folder, **kwargs)
    return theirs(folder)


def theirs(folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        return model(TOKENS).logits


def ours(folder: Path, model: ModelConfig, tp: int = 1, pp: int = 1) -> Tensor:
    """Logits of our checkpoint under a layout, ranks as threads."""
    schedule, tensors = build("1f1b", pp, 1), SavedTensors(folder)

    def logits_step(_: Iterator[Any] | None, module: nn.Module) -> tuple[Tensor, Any]:
        return module(TOKENS), lambda output, non_loss_data: output

    def rank(mesh: ProcessMesh) -> list[Tensor]:
        span = partition(model.layers, schedule.placement)[mesh.pp.rank]
        module = gpt_provider(model, span, mesh.tp).eval()
        load_full([module], tensors.read, mesh.tp)
        return get_forward_backward_func(mesh=mesh, schedule=schedule)(
            forward_step_func=logits_step,
            data_iterator=[None],
            model=[module],
            num_microbatches=1,
            seq_length=TOKENS.shape[1],
            micro_batch_size=TOKENS.shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        )

    outputs = run_threads(rank, tp=tp, pp=pp)[-tp:]
    return torch.cat([output for (output,) in outputs], dim=-1)[..., :101]


def train(root: Path, model: ModelConfig, out: Path) -> Path:
    """Three steps from an imported checkpoint; the folder of the new one."""
    config = Config(
        model=model,
        train=TrainConfig(micro_batch_size=2, seq_length=16, train_iters=3, lr=1e-2),
        data=DataConfig(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=101, num_workers=0),
        checkpoint=CheckpointConfig(load=str(root), finetune=True, save=str(out), save_interval=3),
    )
    tokenizer = build_tokenizer(config.data)
    data = build_datasets(replace(config, data=replace(config.data, eval_iters=0)), tokenizer)
    Run(config, ProcessMesh.single(), gpt_provider, forward_step, data, tokenizer.eod, time.monotonic()).train()
    return commit.folder_of(out, 3)


@pytest.mark.parametrize("family, seed", CASES)
def test_an_imported_model_has_the_same_logits_under_every_layout(family, seed, tmp_path):
    want = saved(family, seed, tmp_path / "hf")
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours", divisible_by=8)
    assert done.config.model.padded_vocab_size == 104
    assert parse(Config, to_flags(done.config)) == done.config
    for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2)):
        torch.testing.assert_close(ours(done.folder, done.config.model, tp, pp), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family, seed", CASES)
def test_a_trained_model_goes_back_and_transformers_reproduces_our_logits(family, seed, tmp_path):
    before = saved(family, seed, tmp_path / "hf")
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours", divisible_by=8)
    trained = train(tmp_path / "ours", done.config.model, tmp_path / "run")
    back = export_checkpoint(trained, tmp_path / "back", vocab_size=101, beside=tmp_path / "hf")
    own = export_checkpoint(trained, tmp_path / "own", vocab_size=101)  # config.json made from our flags
    assert back.vocab_size == own.vocab_size == 101
    want = ours(trained, done.config.model)
    assert (want - before).abs().max() > 0.01
    torch.testing.assert_close(theirs(tmp_path / "back"), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(theirs(tmp_path / "own"), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_the_same_file_to_the_bit(family, tmp_path):
    saved(family, 0, tmp_path / "hf")
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours")
    export_checkpoint(done.folder, tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (tmp_path / "back" / "generation_config.json").exists()


def test_many_files_and_bfloat16_stay_what_they_are(tmp_path, monkeypatch):
    saved("llama", 1, tmp_path / "one")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one").bfloat16()
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    monkeypatch.setattr("megapipe.convert.tensors.SHARD_BYTES", 20_000)
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours")
    assert len(list(done.folder.glob("*.safetensors"))) > 2
    assert done.config.train.bf16
    export_checkpoint(done.folder, tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_the_oldest_gpt2_files_lack_a_prefix_and_hold_masks(tmp_path):
    want = saved("gpt2", 0, tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 24, 24)}, tmp_path / "hf" / "model.safetensors")
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours")
    torch.testing.assert_close(ours(done.folder, done.config.model), want, atol=1e-5, rtol=1e-5)


def test_older_spellings_of_rope_mean_the_same(tmp_path):
    saved("qwen3", 1, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    content = json.loads(path.read_text())
    new = import_checkpoint(tmp_path / "hf", tmp_path / "new").config
    rope = content.pop("rope_parameters")
    content |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": content.pop("dtype")}
    content["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    path.write_text(json.dumps(content))
    assert import_checkpoint(tmp_path / "hf", tmp_path / "old").config == new


def test_padding_hardly_changes_a_loss_even_where_all_logits_are_far_below_zero(tmp_path):
    want = saved("gpt2", 0, tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["transformer.wte.weight"] -= 1.0
    tensors["transformer.ln_f.bias"] += 5.0
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    want = theirs(tmp_path / "hf")
    assert want.max() < -20
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours", divisible_by=8)
    module = gpt_provider(
        done.config.model,
        partition(done.config.model.layers, build("1f1b", 1, 1).placement)[0],
        ProcessMesh.single().tp,
    )
    load_full([module], SavedTensors(done.folder).read, ProcessMesh.single().tp)
    padded = module.eval()(TOKENS).logsumexp(-1)
    assert (padded - want.logsumexp(-1)).abs().max() <= math.log(104 / 101) + 1e-5


LAUNCH = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --micro-batch-size 2 "
    "--global-batch-size 4 --seq-length 16 --train-iters 1 --lr 1e-2 --log-interval 1 --eval-iters 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 101"
)


def test_four_processes_train_an_import_at_tp_2_and_pp_2_without_flags_of_the_model(tmp_path):
    """The first loss is the one that transformers computes on the same tokens."""
    saved("qwen3", 0, tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "ours", divisible_by=8)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "pretrain_gpt.py"]
    load = ["--load", str(tmp_path / "ours"), "--finetune", "--use-checkpoint-args"]
    done = subprocess.run(
        [*launch, *load, *LAUNCH.split()],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (loss,) = re.findall(r"lm loss: (\S+)", done.stdout)

    config = parse(Config, LAUNCH.split())
    data = build_datasets(config, build_tokenizer(config.data)).train
    tokens = torch.stack([torch.from_numpy(data[i]) for i in range(4)])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").float()
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    # Padding adds to the denominator, at most its share.
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert 0 <= float(loss) - want <= math.log(104 / 101)


def refused(work) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        work()
    return caught.value.problems


def test_a_missing_and_a_left_over_tensor_are_named_and_nothing_is_written(tmp_path):
    saved("llama", 0, tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.gate.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")
    save_file(tensors, path)
    assert refused(lambda: import_checkpoint(tmp_path / "hf", tmp_path / "ours")) == (
        "config.json asks for tensors that are missing: model.layers.0.mlp.gate_proj.weight",
        "tensors that config.json knows nothing of: model.layers.0.mlp.gate.weight",
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
        f"transformer.wte.weight [100, {width}] do not fit config.json: 100 rows, but vocab_size is 101",
        f"transformer.wpe.weight [20, {width}] give [20, {width}], but config.json means [24, {width}]",
    )


@pytest.mark.parametrize(
    "change, line",
    [
        ({"hidden_act": "gelu"}, "config.json: hidden_act is gelu; only silu can be converted"),
        (
            {"attention_bias": True, "mlp_bias": False},
            "config.json: attention_bias True with mlp_bias False: there is one switch, --disable-bias-linear",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "config.json: rope_type yarn is not default or llama3"),
        ({"model_type": "bloom"}, "config.json: model_type bloom is none of gpt2, llama, qwen2, qwen3"),
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
    state.write_text(state.read_text().replace('"rotary_interleaved": false', '"rotary_interleaved": true'))
    files = commit.read_manifest(done.folder)
    (done.folder / commit.MANIFEST).write_text(
        commit._manifest_text(0, files | commit.digest(done.folder, ["state.json"]))
    )
    (tmp_path / "ours" / "huggingface" / "config.json").unlink()
    assert refused(lambda: export_checkpoint(done.folder, tmp_path / "back"))[1:] == (
        "--rotary-interleaved is True, but llama has False",
    )


def test_the_tool_imports_and_exports_and_compares(tmp_path):
    saved("qwen2", 0, tmp_path / "hf")
    tool = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py")]
    inward = [*tool, "--from-huggingface", str(tmp_path / "hf"), "--save", str(tmp_path / "ours")]
    done = subprocess.run(inward, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "logits of both models differ by at most" in done.stdout
    assert "--add-qkv-bias" in done.stdout
    outward = [*tool, "--load", str(tmp_path / "ours"), "--to-huggingface", str(tmp_path / "back"), "--no-check"]
    done = subprocess.run(outward, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(theirs(tmp_path / "back"), theirs(tmp_path / "hf"), atol=0, rtol=0)
    assert refused(lambda: export_checkpoint(tmp_path / "ours" / "iter_0000000", tmp_path / "back")) == (
        f"{tmp_path}/back is not empty; give another folder",
    )
