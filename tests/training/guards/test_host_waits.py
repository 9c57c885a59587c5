"""How often a step makes the host wait for its device: counted on the CPU by the calls that would."""

from __future__ import annotations

import pytest
import torch
from short_run import config, run_of
from tiny import STYLES
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.distributed.mesh import ProcessMesh

METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
SHAPED_BY_VALUES = ("nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero")


class Shaped(TorchDispatchMode):
    """Notes operations whose result's shape is only known when the device is done."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in SHAPED_BY_VALUES:
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("train", [{}, {"bf16": True}, {"fp16": True}, {"calculate_per_token_loss": True}], ids=str)
@pytest.mark.parametrize("style, schedule", [("gpt2", "1f1b"), ("llama", "zb-h1")])
def test_a_step_waits_once_for_its_losses_and_its_norm_whatever_the_number_of_microbatches(
    monkeypatch, style, schedule, train
):
    training = run_of(ProcessMesh.single(), config(STYLES[style], schedule=schedule, **train))
    training.driver.whole()  # the first also agrees on the names of the losses
    found: list[str] = []

    def counting(name, original):
        def call(*args, **kwargs):
            found.append(name)
            return original(*args, **kwargs)

        return call

    for name in METHODS:
        monkeypatch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
    with Shaped(found):
        training.driver.whole()
    assert found == ["tolist"]
