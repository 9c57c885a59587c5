"""Random models of the transformers library, to our checkpoints and back: the same logits on both sides."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import FAMILIES, TOKENS, saved, theirs, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megapipe.checkpoint import commit
from megapipe.config import BatchConfig, CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig
from megapipe.convert import SavedTensors, compare_logits, export_checkpoint, import_checkpoint, load_full
from megapipe.convert.checkpoints import Converted
from megapipe.data.build import Datasets, build_datasets
from megapipe.data.tokenizers.tokenizer import build_tokenizer
from megapipe.distributed.mesh import ProcessMesh
from megapipe.flags.parse import parse, to_flags
from megapipe.models.provider import gpt_provider
from megapipe.partition.spans import partition
from megapipe.pipeline_parallel.contracts.forward_backward import get_forward_backward_func
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build
from megapipe.training.forward_step import forward_step
from megapipe.training.pretrain import Training

NIGHTLY = bool(
    os.environ.get("MEGAPIPE_NIGHTLY")
)  # scripts/nightly.sh: every layout (one rank has those of trained models below), and two models are trained on
CASES = [(family, seed) for family in FAMILIES for seed in range(2) if (family, seed) != ("mistral", 0)]
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)] if NIGHTLY else [(2, 2)]  # tp, pp


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Return (folder of theirs, their logits, what came in) of a family's drawn model, made once for three tests."""

    @cache
    def make(family: str, seed: int) -> tuple[Path, Tensor, Converted]:
        folder = tmp_path_factory.mktemp("imported")
        want = saved(family, seed, folder / "hf")
        return folder / "hf", want, import_checkpoint(folder / "hf", folder / "ours", divisible_by=8)

    return make


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
        batch=BatchConfig(micro_batch_size=2, seq_length=16, train_iters=3),
        optimizer=OptimizerConfig(lr=1e-2),
        data=DataConfig(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=101, num_workers=0, split="1,1,98"),
        checkpoint=CheckpointConfig(load=str(root), finetune=True, save=str(out), save_interval=3),
    )
    data = _datasets(replace(config, model=ModelConfig(), checkpoint=CheckpointConfig()))
    eod = build_tokenizer(config.data).eod
    Training(config, ProcessMesh.single(), gpt_provider, forward_step, data, eod, time.monotonic()).train()
    return commit.folder_of(out, 3)


@cache
def _datasets(config: Config) -> Datasets:
    return build_datasets(replace(config, data=replace(config.data, eval_iters=0)), build_tokenizer(config.data))


@pytest.mark.parametrize("family, seed", CASES)
def test_an_imported_model_has_the_same_logits_under_every_layout(imported, family, seed):
    _, want, done = imported(family, seed)
    assert done.config.model.padded_vocab_size == 104
    assert parse(Config, to_flags(done.config)) == done.config
    for tp, pp in LAYOUTS:
        torch.testing.assert_close(ours(done.folder, done.config.model, tp, pp), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family, seed", CASES if NIGHTLY else [case for case in CASES if case[1] == 1])
def test_a_trained_model_goes_back_and_transformers_reproduces_our_logits(imported, family, seed, tmp_path):
    source, before, done = imported(family, seed)
    trained = train(done.folder.parent, done.config.model, tmp_path / "run")
    back = export_checkpoint(trained, tmp_path / "back", vocab_size=101, companion=source)
    own = export_checkpoint(trained, tmp_path / "own", vocab_size=101)  # config.json made from our flags
    assert back.vocab_size == own.vocab_size == 101
    want = ours(trained, done.config.model)
    assert (want - before).abs().max() > 0.01
    torch.testing.assert_close(theirs(tmp_path / "back"), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(theirs(tmp_path / "own"), want, atol=1e-5, rtol=1e-5)


def test_a_model_trained_in_fp8_goes_back_in_the_type_of_its_weights(tmp_path):
    """The command compared logits in eight bits, 0.018 away, and said that it was another model."""
    saved("llama", 0, tmp_path / "hf")
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours", divisible_by=8)
    trained = train(tmp_path / "ours", replace(done.config.model, fp8_format="hybrid"), tmp_path / "run")
    back = export_checkpoint(trained, tmp_path / "back", vocab_size=101)
    assert back.config.model.fp8_format == "hybrid"
    found = compare_logits(tmp_path / "back", trained, back.config.model, 101)
    assert found is not None
    assert found[0] < 1e-5 < found[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_the_same_file_to_the_bit(imported, family, tmp_path):
    source, _, done = imported(family, 1)
    export_checkpoint(done.folder, tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
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
    assert done.config.precision.bf16
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
