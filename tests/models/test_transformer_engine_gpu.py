"""Transformer Engine's kernels against our layers, on a GPU that has both. Elsewhere these tests skip."""

from dataclasses import replace

import pytest
import torch
from tiny import GPT2, LLAMA

from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.models.gpt import GPTModel
from megapipe.models.transformer_engine import load
from megapipe.optim.buffers import FlatBuffers
from megapipe.partition.spans import LayerSpan
from megapipe.tensor_parallel.rng import initialize
from megapipe.tensor_parallel.weight_grad import WeightGrads

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 256, "padded_vocab_size": 512, "max_position_embeddings": 128, "num_layers": 2}
MODELS = {
    "gpt2": replace(GPT2, **SIZES, attention_dropout=0.0, hidden_dropout=0.0),
    "llama": replace(LLAMA, **SIZES, ffn_hidden_size=512),
    "llama, 1p, window": replace(LLAMA, **SIZES, ffn_hidden_size=512, apply_layernorm_1p=True, window_size="63,0"),
}


@pytest.fixture(autouse=True)
def _transformer_engine():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    try:
        load()
    except ConfigError as error:
        pytest.skip(str(error))


def gradients(model, dtype, split):
    """(token losses, flat gradients in float32) of two microbatches; `split` puts weight gradients off."""
    module = GPTModel(model, LayerSpan(0, model.layers, True, True), Axis()).cuda()
    initialize(module, 1, Axis())
    module = module.bfloat16().to(dtype)
    buffers, owner = FlatBuffers(dict(module.named_parameters())), WeightGrads()
    tokens = torch.randint(0, 512, (2, 2, 129), generator=torch.Generator().manual_seed(7)).cuda()
    losses = []
    with owner.capturing():
        losses = [module(part[:, :-1], labels=part[:, 1:]) for part in tokens]
    for microbatch, loss in enumerate(losses):
        if split:
            with owner.deferring(microbatch):
                loss.sum().backward()
        else:
            loss.sum().backward()
    with torch.no_grad():
        for microbatch in owner.owed[::-1]:
            owner.run(microbatch)
    return torch.stack(losses).detach().float(), buffers.grads


@pytest.mark.parametrize("split", [False, True], ids=["BW", "B and W"])
@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_as_near_to_float32_as_ours(name, split):
    """Twice our own distance from float32 at most: both round to bf16, in other places."""
    losses, exact = gradients(replace(MODELS[name], transformer_impl="local"), torch.float32, False)

    def distances(impl):
        rounded_losses, rounded = gradients(replace(MODELS[name], transformer_impl=impl), torch.bfloat16, split)
        return (rounded_losses - losses).norm() / losses.norm(), (rounded - exact).norm() / exact.norm()

    for theirs, ours in zip(distances("transformer_engine"), distances("local"), strict=True):
        assert theirs < 2 * ours


def test_a_b_w_split_adds_up_to_the_same():
    model = replace(MODELS["llama"], transformer_impl="transformer_engine")
    (_, together), (_, apart) = (gradients(model, torch.bfloat16, split) for split in (False, True))
    torch.testing.assert_close(apart, together, rtol=1e-3, atol=1e-5 * together.abs().max().item())
