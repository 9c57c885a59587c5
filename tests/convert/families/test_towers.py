"""A folder of Qwen3.5 with pictures and multi-token prediction comes in as its text model, with a note of the rest."""

from __future__ import annotations

import json
import random

import pytest
import torch
from drawn_families import made
from random_models import TOKENS, delta, rotary, sparse, transformers
from safetensors.torch import load_file, save_file

from megapipe.convert import SavedTensors, compare_logits, export_checkpoint, import_checkpoint, load_full
from megapipe.convert.tensors import whole_model
from megapipe.distributed.axis import Axis

EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
PICTURES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "num_position_embeddings": 16}
PUBLISHED = {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"}
PUBLISHED |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}


SIGHT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize("family", ["exaone_moe", "ernie4_5_moe"])
def test_multi_token_prediction_of_other_names_is_left_out_with_a_line(family, tmp_path):
    """transformers leaves it out as well, and so no program says what it computes."""
    torch.manual_seed(3)
    config = made(family, random.Random(1))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    more = "mtp.norm.weight" if family == "exaone_moe" else "model.mtp_hidden_norm.0.weight"
    save_file(load_file(file) | {more: torch.ones(4)}, file, {"format": "pt"})
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours", divisible_by=8)
    (line,) = [line for line in done.notes if "left out" in line]
    assert line.startswith("multi-token prediction is left out: 1 tensors")


@pytest.mark.parametrize("family", ["llama4", "gemma4"])
def test_a_model_that_sees_pictures_comes_in_as_its_text_model(family, tmp_path):
    text = made(f"{family}_text", random.Random(1)).to_dict()
    pictures = SIGHT | ({"vision_output_dim": 16, "projector_output_dim": 16} if family == "llama4" else {})
    tied = text["tie_word_embeddings"]
    more = {"audio_config": None} if family == "gemma4" else {}
    config = transformers.AutoConfig.for_model(
        family, text_config=text, vision_config=pictures, tie_word_embeddings=tied, **more
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path / "hf")
    done = import_checkpoint(tmp_path / "hf", tmp_path / "ours", divisible_by=8)
    assert any("the model of pictures is left out" in line for line in done.notes)
    module = whole_model(done.config.model)
    load_full([module], SavedTensors(done.folder).read, Axis())
    with torch.no_grad():
        want = model(TOKENS).logits
        got = module.eval()(TOKENS)[..., :101]
    assert (got - want).abs().max() <= 2e-6 * want.abs().max()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_published_files_comes_in(family, tmp_path):
    draw = random.Random(1)
    text = rotary(draw) | {"initializer_range": 0.1} | delta(draw)
    if family == "qwen3_5_moe":
        drawn = sparse(draw)
        text |= {key: drawn[key] for key in EXPERTS} | {"shared_expert_intermediate_size": 20}
        del text["intermediate_size"]
    pictures = PICTURES | {"out_hidden_size": text["hidden_size"]}
    tied = text["tie_word_embeddings"]
    config = transformers.AutoConfig.for_model(
        family, text_config=text, vision_config=pictures, tie_word_embeddings=tied
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    folder = tmp_path / "hf"
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    for name in [name for name in tensors if ".experts.0.gate_proj" in name]:
        start = name.partition("0.gate_proj")[0]
        gate, up, down = (
            torch.stack([tensors.pop(f"{start}{e}.{part}_proj.weight") for e in range(6)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{start}gate_up_proj": torch.cat((gate, up), 1), f"{start}down_proj": down}
    save_file(tensors | {"mtp.norm.weight": torch.ones(4)}, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content["text_config"] |= PUBLISHED
    (folder / "config.json").write_text(json.dumps(content))

    done = import_checkpoint(folder, tmp_path / "ours", divisible_by=8)
    assert "multi-token prediction is left out: 1 tensors (mtp.*)" in done.notes
    assert any("the model of pictures is left out" in line for line in done.notes)
    module = whole_model(done.config.model)
    load_full([module], SavedTensors(done.folder).read, Axis())
    with torch.no_grad():
        want = model(TOKENS).logits
        got = module.eval()(TOKENS)[..., :101]
    assert (got - want).abs().max() <= 2e-6 * want.abs().max()
    found = compare_logits(folder, done.folder, done.config.model, 101)
    assert found is not None
    assert found[0] <= 1e-5 * found[1]

    export_checkpoint(done.folder, tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, want, rtol=0, atol=1e-6)
