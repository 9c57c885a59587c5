"""Compiled layers compute what plain ones do, with the weight gradients where the schedule wants them."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from tiny import GPT2, LLAMA

from megapipe.checks.inputs import machine_problems
from megapipe.config import Config, ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.models.gpt import GPTModel
from megapipe.models.layer import compile_layers
from megapipe.optim.buffers import FlatBuffers
from megapipe.partition.spans import LayerSpan
from megapipe.tensor_parallel.rng import MicrobatchContext, initialize
from megapipe.tensor_parallel.weight_grad import WeightGrads

MODELS = {
    "gpt2": (replace(GPT2, num_layers=2), "inductor"),
    "recompute": (replace(LLAMA, num_layers=2, recompute_granularity="full"), "aot_eager"),
}
if os.environ.get("MEGAPIPE_NIGHTLY"):  # scripts/nightly.sh compiles each feature alone too
    MODELS["llama"] = (replace(LLAMA, num_layers=2), "aot_eager")
    MODELS["gpt2, recompute"] = (replace(GPT2, num_layers=2, recompute_granularity="full"), "aot_eager")


def gradients(model: ModelConfig, backend: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and all gradients of two microbatches, B and W apart."""
    gpt = GPTModel(model, LayerSpan(0, model.layers, True, True), Axis()).double()
    initialize(gpt, 1, Axis())
    buffers = FlatBuffers(dict(gpt.named_parameters()))
    if backend:
        assert compile_layers(gpt, backend) == model.layers
    stage, losses = WeightGrads(), []
    for microbatch in range(2):
        tokens = torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(microbatch))
        with stage.capturing(), MicrobatchContext(1, microbatch).active():
            losses.append(gpt(tokens[:, :-1], labels=tokens[:, 1:]))
        with stage.deferring(microbatch):
            losses[-1].sum().backward()
        assert stage.owed == (microbatch,)
        with torch.no_grad():
            stage.run(microbatch)
    return torch.stack(losses).detach(), buffers.grads


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_equal_those_of_plain_layers(name):
    torch.compiler.reset()
    model, backend = MODELS[name]
    plain, compiled = gradients(model, None), gradients(model, backend)
    torch.testing.assert_close(compiled[0], plain[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(compiled[1], plain[1], rtol=1e-10, atol=1e-12)


def test_five_layers_are_compiled_once():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    gradients(replace(GPT2, num_layers=1), "eager")
    few = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    gradients(replace(GPT2, num_layers=5), "eager")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == few


def test_without_a_compiler_the_flag_is_refused(monkeypatch):
    config = Config(model=ModelConfig(compile=True))
    assert not list(machine_problems(config, has_cuda=False))
    monkeypatch.setattr("megapipe.checks.inputs.which", lambda name: None)
    assert list(machine_problems(config, has_cuda=False)) == [
        "--compile needs a C++ compiler, and there is no g++ or clang++ in PATH. Install one, or leave it out."
    ]
