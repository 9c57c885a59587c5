"""Depths of multi-token prediction in DeepSeek-V3's published layout, beside transformers' own reading of them."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path

import pytest
import torch
from random_models import TOKENS, deepseek_v3, save, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megapipe.convert import SavedTensors, export_checkpoint, import_checkpoint, load_full
from megapipe.convert.tensors import whole_model
from megapipe.distributed.axis import Axis
from megapipe.partition.spans import whole

LAST = 2
DEPTH = f"model.layers.{LAST}."


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A tiny DeepSeek-V3, and behind its layers a depth of this layout with copies of embedding and head."""
    config = deepseek_v3(random.Random("depths"))
    config.update({"num_hidden_layers": LAST + 1, "first_k_dense_replace": LAST - 1, "tie_word_embeddings": False})
    folder = tmp_path_factory.mktemp("published")
    save(config, folder, seed=5)
    tensors, hidden = load_file(folder / "model.safetensors"), config.hidden_size
    norms = "enorm", "hnorm", "shared_head.norm"
    tensors |= {f"{DEPTH}{name}.weight": 1 + 0.1 * torch.randn(hidden) for name in norms}
    tensors[f"{DEPTH}eh_proj.weight"] = 0.2 * torch.randn(hidden, 2 * hidden)
    tensors[f"{DEPTH}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{DEPTH}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content |= {"num_hidden_layers": LAST, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def ours(folder: Path, model) -> list[Tensor]:
    """Logits of the model, and of its depth at all places that have a next token."""
    own, further = whole(model.layers, 1)
    modules = [whole_model(model, span).eval() for span in (own, further)]
    load_full(modules, SavedTensors(folder).read, Axis())
    with torch.no_grad():
        first = modules[0](TOKENS)
        modules[1].set_input_tensor(modules[0].take_hidden_states()[:-1])
        ahead = TOKENS[:, 1:]
        return [first[..., :101], modules[1](ahead, torch.arange(ahead.shape[1]).expand_as(ahead))[..., :101]]


def theirs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The same by transformers, whose model of depths is its own; it says what it misses or does not know. It knows
    depths by the published model's 61 layers."""
    library = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    known = [rf"model\.layers\.{LAST}.*"]
    monkeypatch.setattr(library.DeepseekV3PreTrainedModel, "_keys_to_ignore_on_load_unexpected", known)
    model, said = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    layers = importlib.import_module("transformers.modeling_layers")
    cache = importlib.import_module("transformers.cache_utils")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this version of transformers has no model of depths")
    depth, ahead = layers.MtpModel.from_pretrained(model.eval()).eval(), TOKENS[:, 1:]
    with torch.no_grad():
        out = model.model(TOKENS).last_hidden_state
        places = torch.arange(1, TOKENS.shape[1]).expand_as(ahead)
        held = cache.MtpCache(config=model.config.get_mtp_config())
        return [model.lm_head(out), model.lm_head(depth.forward_layer(0, out[:, :-1], places, held, input_ids=ahead))]


def test_a_published_depth_comes_in_and_goes_out_to_the_bit_with_transformers_logits(published, tmp_path, monkeypatch):
    done = import_checkpoint(published, tmp_path / "ours", divisible_by=8)
    assert done.config.model.depths == 1
    export_checkpoint(done.folder, tmp_path / "back", vocab_size=101)
    before, after = (load_file(folder / "model.safetensors") for folder in (published, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert any(note.startswith("transformers leaves model.layers.2 and on out, ") for note in done.notes)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    for mine, its in zip(ours(done.folder, done.config.model), theirs(tmp_path / "back", monkeypatch), strict=True):
        assert (mine - its).abs().max() <= 2e-6 * its.abs().max()


def test_copies_may_be_missing_and_one_that_is_another_is_left_with_a_note(published, tmp_path):
    tensors = load_file(published / "model.safetensors")
    del tensors[f"{DEPTH}embed_tokens.weight"]
    tensors[f"{DEPTH}shared_head.head.weight"][3, 0] += 1.0
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text((published / "config.json").read_text())
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours")
    said = [note for note in done.notes if "left out" in note]
    assert said == [
        f"{DEPTH}shared_head.head.weight is left out, though it is not as lm_head.weight, which depths share"
    ]
