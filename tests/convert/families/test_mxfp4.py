"""gpt-oss comes in as it is published: experts in mxfp4."""

from __future__ import annotations

import json
import random

import pytest
import torch
from drawn_families import DRAWN
from random_models import TOKENS, theirs, transformers
from safetensors.torch import load_file, save_file

from megapipe.convert import SavedTensors, import_checkpoint, load_full
from megapipe.convert.mxfp4 import dequantised
from megapipe.convert.tensors import whole_model
from megapipe.distributed.axis import Axis


def test_numbers_are_those_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(1)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), dtype=torch.uint8)
    assert torch.equal(dequantised(blocks, scales), convert_moe_packed_tensors(blocks, scales))


def test_two_numbers_of_a_byte_by_hand():
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0] = 0xF3
    found = dequantised(blocks, torch.full((1, 1, 1), 129, dtype=torch.uint8))
    assert found.shape == (1, 32, 1)
    assert found[0, :3, 0].tolist() == [1.5 * 4, -6.0 * 4, 0.0]


@pytest.mark.parametrize("named", [True, False])
def test_a_quantised_model_has_the_logits_of_its_dequantised_weights(named, tmp_path):
    """Blocks and scales stand for the experts' two matrices, and config.json names the method."""
    torch.manual_seed(2)
    config = DRAWN["gpt_oss"](random.Random(1))
    config.hidden_size, config.intermediate_size = 64, 32
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    plain, packed = load_file(path), {}
    for name, tensor in plain.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, rows, columns = tensor.shape
            blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 125, (experts, columns, rows // 32), dtype=torch.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = dequantised(blocks, scales)
        else:
            packed[name] = tensor
    save_file(plain, path, metadata={"format": "pt"})
    want = theirs(tmp_path / "hf")
    save_file(packed, path, metadata={"format": "pt"})
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    if named:
        said["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        (tmp_path / "hf" / "config.json").write_text(json.dumps(said))
        done = import_checkpoint(tmp_path / "hf", tmp_path / "ours", divisible_by=8)
        module = whole_model(done.config.model)
        load_full([module], SavedTensors(done.folder).read, Axis())
        with torch.no_grad():
            got = module.float().eval()(TOKENS)[..., :101]
        assert (got - want).abs().max() <= 2e-6 * want.abs().max()
        kept = json.loads((tmp_path / "ours" / "huggingface" / "config.json").read_text())
        assert "quantization_config" not in kept
    else:
        with pytest.raises(Exception, match="_blocks"):
            import_checkpoint(tmp_path / "hf", tmp_path / "ours", divisible_by=8)
