"""Parameters and gradients lie flat, aligned, and stay what they were."""

import pytest
import torch
from torch import nn

from megapipe.optim.buffers import ALIGN, FlatBuffers
from megapipe.pipeline_parallel.threads import run_threads


def toy(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False)).to(dtype)


def test_parameters_keep_their_values_and_become_views_of_one_buffer():
    model = toy()
    before = [p.detach().clone() for p in model.parameters()]
    flat = FlatBuffers(dict(model.named_parameters()))
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, value)
        assert param.untyped_storage().data_ptr() == flat.model.untyped_storage().data_ptr()
        assert (param.data_ptr() - flat.model.data_ptr()) % (4 * ALIGN) == 0
        assert param.main_grad.shape == param.shape
    assert flat.main is flat.model


def test_decayed_weights_come_first_and_biases_and_norms_after():
    model = toy()
    flat = FlatBuffers(dict(model.named_parameters()))
    assert flat.own == ("0.weight", "2.weight", "0.bias", "1.weight", "1.bias")
    assert [(group.weight_decay, where) for group, _, _, where in flat.sections] == [
        (1.0, slice(0, 2 * ALIGN)),
        (0.0, slice(2 * ALIGN, 5 * ALIGN)),
    ]


def test_a_borrowed_weight_has_a_gradient_and_no_storage():
    model = toy()
    flat = FlatBuffers(dict(model.named_parameters()), borrowed={"2.weight"})
    assert (flat.model.numel(), flat.grads.numel()) == (4 * ALIGN, 5 * ALIGN)
    assert model[2].weight.main_grad.shape == (3, 7)


@pytest.mark.parametrize(
    ("dtype", "main"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_autograd_adds_into_main_grad_of_the_right_dtype(dtype, main):
    model = toy(dtype)
    twin = toy(dtype)
    flat = FlatBuffers(dict(model.named_parameters()))
    x = torch.randn(4, 5, dtype=dtype)
    for net in (model, twin):
        net(x).sum().backward()
    first = [p.grad.to(main) for p in twin.parameters()]
    model(2 * x).sum().backward()
    twin.zero_grad()
    twin(2 * x).sum().backward()
    for param, other, grad in zip(model.parameters(), twin.parameters(), first, strict=True):
        assert param.grad is None
        assert param.main_grad.dtype == main
        assert torch.equal(param.main_grad, grad + other.grad.to(main))
    flat.zero_grad()
    assert not flat.grads.any()
    assert all(
        p.main_grad.untyped_storage().data_ptr() == flat.grads.untyped_storage().data_ptr() for p in model.parameters()
    )


def test_bf16_weights_are_the_rounded_main_parameters():
    model = toy(torch.bfloat16)
    flat = FlatBuffers(dict(model.named_parameters()))
    flat.main += 1e-3
    flat.copy_main_to_model()
    assert torch.equal(flat.model, flat.main.bfloat16())
    assert not torch.equal(flat.model.float(), flat.main)
    flat.copy_model_to_main()
    assert torch.equal(flat.model.float(), flat.main)


def test_gradients_are_summed_over_data_parallel():
    def body(mesh):
        model = toy()
        flat = FlatBuffers(dict(model.named_parameters()), replicas=mesh.dp)
        model[0].weight.main_grad.fill_(mesh.dp.rank + 1)
        flat.start_reduce()()
        return model[0].weight.main_grad

    for grad in run_threads(body, dp=3):
        assert torch.equal(grad, torch.full((7, 5), 6.0))
