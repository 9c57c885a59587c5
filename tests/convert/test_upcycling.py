"""Experts made of a dense model's MLPs: the model that begins is the dense one, and then it trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from short_run import config, run_of
from tiny import GPT2, LLAMA
from torch import Tensor

from megapipe.checkpoint.save_load import refuse_save
from megapipe.config import CheckpointConfig, Config, ModelConfig
from megapipe.convert import SavedTensors, load_full
from megapipe.convert.checkpoints import write_checkpoint
from megapipe.convert.tensors import whole_model
from megapipe.convert.upcycle import upcycle
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import layout_of, saved_tensors
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError
from megapipe.models.gpt import GPTModel
from megapipe.partition.spans import whole

CASES = {
    "copies": (LLAMA, {"num_experts": 4}, 1),
    "slices": (
        LLAMA,
        {"num_experts": 8, "moe_router_topk": 4, "ffn_hidden_size": 12, "moe_router_score_function": "sigmoid"}
        | {"moe_router_topk_scaling_factor": 2.0, "moe_router_enable_expert_bias": True},
        4,
    ),
    "biases": (GPT2, {"num_experts": 6, "ffn_hidden_size": 64}, 2),
    "some layers": (
        LLAMA,
        {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_layer_freq": "[0,1,1,0]", "moe_router_topk": 4},
        1,
    ),
}


def dense(root: Path, model: ModelConfig) -> tuple[Path, GPTModel]:
    """A checkpoint of random weights, and the model."""
    run = config(model)
    module, *depths = (whole_model(run.model, span) for span in whole(run.model.layers, run.model.depths))
    generator = torch.Generator().manual_seed(3)
    found = [pair for piece in (module, *depths) for pair in saved_tensors(piece)]
    with torch.no_grad():
        for _, param in found:
            param.normal_(0.0, 0.3, generator=generator)
    tensors = [(name, x.view(layout_of(x).full)) for name, x in found if not layout_of(x).tied_to]
    folder = write_checkpoint(root, run, tensors)
    load_full([module], SavedTensors(folder).read, Axis())  # a tied head is its embedding
    return folder, module


def logits(module: GPTModel) -> Tensor:
    tokens = torch.randint(0, 127, (2, 16), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        return module.double().eval()(tokens)


def sparse(root: Path, model: ModelConfig, granularity: int) -> Config:
    files = CheckpointConfig(
        load=f"{root}/dense", save=f"{root}/made", moe_use_upcycling=True, moe_upcycling_granularity=granularity
    )
    return replace(config(model), checkpoint=files)


@pytest.mark.parametrize("case", CASES)
def test_the_model_with_experts_begins_as_the_dense_one(tmp_path, case):
    model, changed, granularity = CASES[case]
    folder, before = dense(tmp_path / "dense", model)
    run = sparse(tmp_path, replace(model, **changed), granularity)
    made = upcycle(folder, tmp_path / "made", run)
    after = whole_model(run.model)
    load_full([after], SavedTensors(made).read, Axis())
    want = logits(before)
    assert want.std() > 0.5
    torch.testing.assert_close(logits(after), want, atol=1e-12, rtol=1e-12)


def test_a_run_begins_with_the_loss_of_the_dense_model_and_its_checkpoint_is_in_save(tmp_path):
    """With a depth of multi-token prediction, whose MLP becomes experts as those of the layers."""
    model = replace(LLAMA, mtp_num_layers=1)
    dense(tmp_path / "dense", model)
    alone = ProcessMesh.single()
    before = run_of(alone, replace(config(model), checkpoint=CheckpointConfig(load=f"{tmp_path}/dense", finetune=True)))
    flags = sparse(tmp_path, replace(model, num_experts=4), 1)
    training = run_of(alone, flags)
    first, wanted = training.driver.whole(), before.driver.whole()
    for name in ("lm loss", "mtp_1 loss"):
        assert first.losses[name] == pytest.approx(wanted.losses[name], rel=1e-6)
    assert training.driver.whole().losses["lm loss"] < first.losses["lm loss"]
    assert training.run.progress.iteration == 2
    with pytest.raises(CheckpointError) as raised:
        refuse_save(flags.checkpoint, tmp_path / "dense" / "iter_0000000")
    assert raised.value.problems == (
        f"--save {tmp_path}/made has checkpoints already: experts were made there. To go on with them leave out "
        f"--moe-use-upcycling and use --load {tmp_path}/made, or give another folder: --save {tmp_path}/made-upcycled",
    )


def test_a_checkpoint_of_another_width_or_with_experts_is_refused(tmp_path):
    folder, _ = dense(tmp_path / "dense", LLAMA)
    run = sparse(tmp_path, replace(LLAMA, num_experts=4, ffn_hidden_size=12), 2)
    with pytest.raises(CheckpointError) as raised:
        upcycle(folder, tmp_path / "made", run)
    assert "(experts are to be made of MLPs of --ffn-hidden-size 12 x --moe-upcycling-granularity 2)" in str(
        raised.value
    )
    made = upcycle(folder, tmp_path / "made", sparse(tmp_path, replace(LLAMA, num_experts=4), 1))
    with pytest.raises(CheckpointError) as raised:
        upcycle(made, tmp_path / "again", sparse(tmp_path, replace(LLAMA, num_experts=4), 1))
    assert raised.value.problems == (f"{made} has experts already. Leave out --moe-use-upcycling.",)
