"""What the optimizer keeps in bf16 (--use-precision-aware-optimizer), beside torch's AdamW with rounded state."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from toy_run import SINGLE
from whole_step import take_step

from megapipe.checkpoint.save_load import load_checkpoint, save_checkpoint
from megapipe.config import Config, OptimizerConfig
from megapipe.errors import UserError
from megapipe.flags.parse import parse
from megapipe.optim import rules
from megapipe.optim.optimizer import Optimizer
from megapipe.plan.state import bytes_of_state

FLAGS = OptimizerConfig(lr=1e-2, clip_grad=0.0)
ROUNDED = dict.fromkeys(("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), "bf16")


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48, bias=False), nn.Linear(48, 16, bias=False)).to(dtype)


def steps(net: nn.Module, optimizer: Optimizer, *numbers: int) -> None:
    """Gradients are drawn, the same for all."""
    for step in numbers:
        draw = torch.Generator().manual_seed(step)
        for param in net.parameters():
            param.main_grad.copy_(torch.randn(param.shape, generator=draw).bfloat16())
        take_step(optimizer, FLAGS.lr)


@pytest.mark.parametrize("names", [("exp_avg_dtype",), ("exp_avg_dtype", "exp_avg_sq_dtype"), tuple(ROUNDED)])
def test_an_update_is_torchs_adamw_whose_state_is_rounded_after_it(names, monkeypatch):
    monkeypatch.setattr(rules, "PIECE", 512)  # of 1536 elements in all
    flags = replace(FLAGS, use_precision_aware_optimizer=True, **dict.fromkeys(names, "bf16"))
    net, plain = model(), model()
    optimizer = Optimizer([net], flags, SINGLE)
    steps(net, optimizer, *range(5))

    kept = [p.detach().float() for p in plain.parameters()]
    state = {name: [torch.zeros_like(x) for x in kept] for name in ("exp_avg", "exp_avg_sq")}
    for step in range(5):
        draw = torch.Generator().manual_seed(step)
        for i, x in enumerate(kept):
            x.grad = torch.randn(x.shape, generator=draw).bfloat16().float()
            adamw = torch.optim.AdamW([x], FLAGS.lr, (FLAGS.adam_beta1, FLAGS.adam_beta2), FLAGS.adam_eps, fused=True)
            adamw.param_groups[0]["weight_decay"] = FLAGS.weight_decay
            adamw.state[x] = {"step": torch.tensor(float(step)), **{name: state[name][i] for name in state}}
            adamw.step()
            for name in state:
                if f"{name}_dtype" in names:
                    state[name][i] = state[name][i].bfloat16().float()
            if "main_params_dtype" in names:
                x.copy_(x.bfloat16())
    for x, p, (key, _) in zip(kept, net.parameters(), net.named_parameters(), strict=True):
        assert torch.equal(p, x.bfloat16())
        for name, values in state.items():
            assert torch.equal(optimizer.state()[name][key].float(), values[[*dict(net.named_parameters())].index(key)])


def test_a_float64_model_may_keep_its_moments_in_bf16():
    """The update of float64 weights with rounded moments called itself without end."""
    torch.manual_seed(0)
    net = nn.Linear(8, 4, bias=False).double()
    plain = net.weight.detach().clone().requires_grad_()
    flags = replace(FLAGS, use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    optimizer = Optimizer([net], flags, SINGLE)
    net.weight.main_grad.fill_(0.25)  # a power of two: its moments are exact in bf16 after one step
    take_step(optimizer, FLAGS.lr)
    plain.grad = torch.full_like(plain, 0.25)
    betas = (FLAGS.adam_beta1, FLAGS.adam_beta2)
    torch.optim.AdamW([plain], FLAGS.lr, betas, FLAGS.adam_eps, FLAGS.weight_decay).step()
    torch.testing.assert_close(net.weight.detach(), plain.detach(), rtol=1e-12, atol=1e-14)


def test_memory_is_what_the_plan_counts():
    lion = f"{Path(__file__).parents[2]}/examples/own_optimizer.py:lion"  # keeps one number, and was planned as Adam
    of_others = (replace(FLAGS, optimizer=name) for name in ("sgd", lion))
    half = replace(FLAGS, exp_avg_dtype="bf16")
    of_bf16 = [(flags, True) for flags in (FLAGS, replace(FLAGS, **ROUNDED), half, *of_others)]
    for flags, bf16 in [*of_bf16, (FLAGS, False)]:
        optimizer = Optimizer([model(torch.bfloat16 if bf16 else torch.float32)], flags, SINGLE)
        (b,), moments = optimizer.owned, [x for flats in optimizer.moments.values() for x in flats]
        apart = [b.main] if b.main.data_ptr() != b.model.data_ptr() else []
        held = [sum(x.nbytes for x in tensors) / b.model.numel() for tensors in ([b.grads], moments, apart)]
        assert tuple(held) == bytes_of_state(flags, bf16)


@pytest.mark.parametrize("before, after", [({}, ROUNDED), (ROUNDED, {})])
def test_a_checkpoint_loads_into_state_of_other_types(before, after, tmp_path):
    runs = []
    for dtypes in (before, after):
        net = model()
        runs.append((net, Optimizer([net], replace(FLAGS, **dtypes), SINGLE)))
    (net, optimizer), (other, taken) = runs
    steps(net, optimizer, 0, 1)
    counts = {"consumed_train_samples": 2, "consumed_valid_samples": 0}
    config = Config(optimizer=FLAGS).with_fields(micro_batch_size=1, train_iters=10, bf16=True)
    folder = save_checkpoint(tmp_path, 2, [net], optimizer, counts, config, SINGLE)
    load_checkpoint(folder, [other], taken, config, SINGLE)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    there = taken.state()
    for kind, tensors in optimizer.state().items():
        assert all(torch.equal(x.bfloat16(), there[kind][name].bfloat16()) for name, x in tensors.items())
    steps(other, taken, 2)


@pytest.mark.parametrize("flag", ["--exp-avg-sq-dtype fp8", "--main-params-dtype fp16"])
def test_other_types_are_refused_by_name(flag):
    with pytest.raises(UserError, match=f"{flag}: expected fp32 or bf16"):
        parse(Config, flag.split())
