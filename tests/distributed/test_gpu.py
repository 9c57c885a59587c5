"""Twenty steps on a GPU against the same on the CPU, from the same weights. Elsewhere these tests skip."""

from dataclasses import replace

import pytest
import torch
from short_run import STEPS, config, run_of, train
from tiny import STYLES

from megapipe.commands.gpu.measures import graphs
from megapipe.distributed.mesh import ProcessMesh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused loss"])
@pytest.mark.parametrize("flags, within", [({}, 1e-3), ({"bf16": True}, 2e-2)], ids=["float32", "bf16"])
@pytest.mark.parametrize("style, schedule", [("gpt2", "1f1b"), ("llama", "zb-h1"), ("llama", "dualpipe-v")])
def test_a_gpu_trains_as_the_cpu_does(style, schedule, flags, within, fused):
    model = replace(STYLES[style], attention_dropout=0.0, hidden_dropout=0.0, cross_entropy_loss_fusion=fused)
    got, want = (
        train(ProcessMesh.single(device), config(model, schedule=schedule, **flags))
        for device in (DEVICE, torch.device("cpu"))
    )
    assert len(got) == STEPS
    for (loss, _), (on_cpu, _) in zip(got, want, strict=True):
        assert loss == pytest.approx(on_cpu, rel=within)


def test_the_weights_stay_on_the_gpu():
    training = run_of(ProcessMesh.single(DEVICE), config(STYLES["llama"], bf16=True))
    training.driver.whole()
    assert {p.device for module in training.run.modules for p in module.parameters()} == {DEVICE}
    assert {b.main.device for b in training.run.optimizer.owned} == {DEVICE}


def test_passes_by_cuda_graphs_have_the_bits_of_launched_ones():
    found = graphs(DEVICE)
    assert found.passed, found
