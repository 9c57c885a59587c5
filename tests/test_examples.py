"""Each example does what it says: the hooks that people extend, used from outside."""

import random
from contextlib import contextmanager, nullcontext
from contextvars import Context
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from whole_step import take_step

from examples import deepseek_pairs, megatron_shaped, own_run
from examples.deepseek_pairs import Stage
from megapipe.commands import schedules
from megapipe.config import OptimizerConfig
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.models.provider import gpt_provider
from megapipe.optim.optimizer import Optimizer
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build, simulate
from megapipe.training.forward_step import forward_step
from megapipe.training.hooks import Callback
from megapipe.training.pretrain import Training
from tools.proofs import fuzz_equivalence
from tools.proofs.equivalence_case import Case

ROOT = Path(__file__).parent.parent
OWN = [f"{ROOT}/examples/own_schedule.py:{name}" for name in ("eager", "split")]


def test_no_example_is_long():
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert lines
    assert {name: n for name, n in lines.items() if n >= (150 if "provider" in name else 60)} == {}


def test_own_schedules_have_the_bubble_that_their_diagrams_show():
    p, m = 4, 8
    eager, split = (build(name, p, m, **given) for name, given in zip(OWN, ({}, {"chunks": 2}), strict=True))
    assert simulate(eager).makespan == simulate(build("1f1b", p, m)).makespan  # it only hides messages
    assert simulate(eager).peak == (7, 5, 3, 1)
    assert simulate(split).makespan == 3 * m + (p - 1)  # W hides all of the bubble but a forward half and a backward


@pytest.mark.parametrize("command", ["list", "show", "compare"])
def test_the_tool_knows_own_schedules(command, capsys):
    size = [] if command == "list" else ["--pp", "4", "--microbatches", "8"]
    only = ["--only", "zb-h1"] if command == "compare" else []
    names = OWN[:1] if command == "show" else OWN
    assert schedules.main([command, *names, *size, *only]) == 0
    said = capsys.readouterr()
    assert all(name in said.out for name in (["eager: makespan"] if command == "show" else OWN))
    if command == "compare":  # 1f1b is the measure of all others, and stderr is no terminal
        assert [line.split()[0] for line in said.out.split("\n\n")[0].splitlines()[1:]] == [
            OWN[1], "zb-h1", OWN[1], "1f1b", OWN[0],
        ]  # fmt: skip
        assert said.err == ""


def test_the_fuzzer_draws_own_schedules_and_they_train_to_the_bits_of_one_process():
    assert fuzz_equivalence.draw(random.Random(3), OWN[:1]).schedule == OWN[0]
    case = Case(OWN[1], pp=2, microbatches=2, layers=(1, 0, 1, 1), chunks=2, steps=2)
    assert case.same_bits
    assert fuzz_equivalence.run(case) == []


@pytest.mark.parametrize("name, ranks", [("dualpipe", 4), ("dualpipe-v", 4), ("dualpipe", 2), ("zb-v", 2)])
def test_deepseeks_pairs_have_the_loss_and_gradients_of_one_process(name, ranks, monkeypatch):
    pairs, pair = [], Stage.overlapped_forward_backward
    monkeypatch.setattr(Stage, "overlapped_forward_backward", lambda *given: pairs.append(1) or pair(*given))
    losses, grads = deepseek_pairs.train(ProcessMesh.single(), "naive")
    found = run_threads(lambda mesh: deepseek_pairs.train(mesh, name), pp=ranks)
    both = [(value, losses[n]) for mine, _ in found for n, value in mine.items()]
    assert len(both) == deepseek_pairs.MICROBATCHES
    both += [(value, grads[n]) for _, mine in found for n, value in mine.items()]
    assert max((a - b).norm() / b.norm() for a, b in both) < 1e-13
    assert {n for _, mine in found for n in mine} == grads.keys()
    table = build(name, ranks, deepseek_pairs.MICROBATCHES)
    assert len(pairs) == sum(len(step) == 2 for row in table.ranks for step in row)
    assert bool(pairs) == ("dualpipe" in name)


def test_what_one_process_trains_is_plain_autograd():
    losses, grads = deepseek_pairs.train(ProcessMesh.single(), "naive")
    whole = Stage(range(deepseek_pairs.BLOCKS))
    draw = torch.Generator().manual_seed(0)
    xs, ys = torch.randn(2, deepseek_pairs.MICROBATCHES, 3, deepseek_pairs.WIDTH, generator=draw, dtype=torch.float64)
    loss = torch.stack([torch.nn.functional.mse_loss(whole(x), y) for x, y in zip(xs, ys, strict=True)]).sum()
    loss.backward()
    torch.testing.assert_close(sum(losses.values()), loss.detach(), rtol=1e-13, atol=0)
    assert all((grads[n] - w.grad).norm() / w.grad.norm() < 1e-13 for n, w in whole.blocks.items())


def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw, size = torch.Generator().manual_seed(step), (megatron_shaped.LENGTH, 2)
    data = torch.randn(megatron_shaped.MICROBATCHES, *size, megatron_shaped.WIDTH, generator=draw, dtype=torch.float64)
    masks = (torch.rand(len(data), *size, generator=draw) < 0.7).double()
    return list(zip(data, masks, strict=True))


def plain_torch(steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """The training of megatron_shaped without megapipe: the losses of all microbatches, weights after the last."""
    weights = [megatron_shaped.Part(None, number).weight for number in range(2)]
    optimizer, losses = torch.optim.SGD(weights, lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        for x, mask in batches(step):
            for weight in weights:
                x = x + torch.tanh(x @ weight)
            loss = (x.square().mean(-1) * mask).sum() / mask.sum()
            losses.append(loss.item())
            (loss / megatron_shaped.MICROBATCHES).backward()
        optimizer.step()
    return losses, [weight.detach() for weight in weights]


class Wrapped(torch.nn.Module):
    """As Megatron's DistributedDataParallel: config and set_input_tensor are the inner module's."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.module(data)


def megatron_training(mesh, steps: int, chunks: int, **config):
    """A rank with one of two stages, or (chunks 2) with both."""
    numbers = range(chunks) if chunks == 2 else [mesh.pp.rank]
    said = SimpleNamespace(hidden_size=megatron_shaped.WIDTH, pipeline_model_parallel_size=mesh.pp.size, **config)
    model = [Wrapped(megatron_shaped.Part(said, number)) for number in numbers]
    optimizer = torch.optim.SGD([p for chunk in model for p in chunk.parameters()], lr=0.1)
    losses = []
    for step in range(steps):
        data = [iter(batches(step)) for _ in model]
        reported = megatron_shaped.train_step(data if chunks == 2 else data[0], model, optimizer)
        losses += [(total / count).item() for total, count in (one["lm loss"] for one in reported)]
    return losses, [part.module.weight.detach() for part in model]


@pytest.mark.parametrize("pp, chunks", [(2, 1), (1, 2)])
def test_megatrons_own_train_step_trains_as_plain_torch(pp, chunks):
    losses, weights = plain_torch(3)
    ranks = run_threads(lambda mesh: megatron_training(mesh, 3, chunks), pp=pp)
    torch.testing.assert_close([loss for mine, _ in ranks for loss in mine], losses, rtol=1e-14, atol=0)
    torch.testing.assert_close([w for _, mine in ranks for w in mine], weights, rtol=1e-13, atol=0)


def test_a_megatron_config_is_told_when_to_synchronise_and_at_the_end():
    """As its DistributedDataParallel: off but in each stage's last backward, finalised once with all tokens."""

    def rank(mesh):
        seen = []

        @contextmanager
        def no_sync():
            seen.append("off")
            yield
            seen.append("on")

        def finalize(model, num_tokens, pg_collection=None, force_all_reduce=False):
            grads = [p.grad.clone() for chunk in model for p in chunk.parameters()]
            seen.append(("finalized", num_tokens.item(), force_all_reduce))
            for grad, p in zip(grads, (p for chunk in model for p in chunk.parameters()), strict=True):
                p.grad = grad / 7

        said = {
            "no_sync_func": no_sync,
            "param_sync_func": lambda params: seen.append(len(list(params))),
            "finalize_model_grads_func": finalize,
            "calculate_per_token_loss": True,
            "grad_scale_func": lambda loss: loss * 8,
        }
        before = megatron_shaped.Part(None, mesh.pp.rank).weight.detach()
        _, (after,) = megatron_training(mesh, 1, 1, **said)
        return seen, (before - after) / 0.1 * 7 / 8

    first, last = run_threads(rank, pp=2)
    tokens = int(sum(mask.sum() for _, mask in batches(0)))
    assert last[0] == [1, "off", "on", "off", "on", ("finalized", tokens, False)]
    assert first[0] == [1, "off", "on", "off", "on", ("finalized", 0, False)]
    weights = [megatron_shaped.Part(None, number).weight for number in range(2)]
    total = 0.0
    for x, mask in batches(0):
        for weight in weights:
            x = x + torch.tanh(x @ weight)
        total = total + (x.square().mean(-1) * mask).sum()
    total.backward()  # neither divided by tokens nor by microbatches
    for (_, grad), weight in zip((first, last), weights, strict=True):
        torch.testing.assert_close(grad, weight.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"overlap_moe_expert_parallel_comm": True}, "config.overlap_moe_expert_parallel_comm is True, which"),
        ({"context_parallel_size": 2}, "config.context_parallel_size is 2, and the mesh has 1"),
        ({"grad_sync_func": [print, print]}, "config.grad_sync_func has 2 functions for 1 model chunks"),
    ],
)
def test_what_a_megatron_config_asks_in_vain_is_refused_by_name(said, sentence):
    with pytest.raises(ConfigError) as caught:
        run_threads(lambda mesh: megatron_training(mesh, 1, 1, **said), pp=2)
    assert sentence in str(caught.value)


def test_grad_sync_func_takes_the_place_of_synchronising_in_the_last_backward():
    def rank(mesh):
        seen = []
        told = {"no_sync_func": nullcontext, "grad_sync_func": lambda params: seen.append(len(list(params)))}
        megatron_training(mesh, 1, 1, **told)
        return seen

    assert run_threads(rank, pp=2) == [[1], [1]]


def test_without_a_mesh_the_step_says_how_to_make_one():
    given = iter(()), [megatron_shaped.Part(None, 0)], torch.optim.SGD([torch.ones(1)], lr=1)
    with pytest.raises(ConfigError, match=r"there is no mesh: call ProcessMesh\.create"):
        Context().run(megatron_shaped.train_step, *given)  # whatever mesh another test has made in this process


def test_an_own_optimizer_trains_the_same_split_by_zero_1_and_whole():
    """Lion by hand in three lines."""
    lion = OptimizerConfig(optimizer=f"{ROOT}/examples/own_optimizer.py:lion", adam_beta2=0.99, clip_grad=0.0)

    def trained(mesh, distributed):
        module = torch.nn.Linear(8, 16).double()
        torch.nn.init.ones_(module.weight)
        optimizer = Optimizer([module], lion, mesh, distributed=distributed)
        for step in range(1, 4):
            optimizer.zero_grad()
            module.weight.main_grad.copy_(gradient(step))
            take_step(optimizer, 0.1, grad_scale=1 / mesh.dp.size)
        return module.weight.detach()

    def gradient(step):
        return torch.randn(16, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)

    weight, momentum = torch.ones(16, 8, dtype=torch.float64), torch.zeros(16, 8, dtype=torch.float64)
    for step in range(1, 4):
        update = (0.9 * momentum + 0.1 * gradient(step)).sign()
        weight = weight * (1 - 0.1 * 0.01) - 0.1 * update
        momentum = 0.99 * momentum + 0.01 * gradient(step)
    for distributed in (False, True):
        for mine in run_threads(lambda mesh: trained(mesh, distributed), dp=2):  # noqa: B023
            torch.testing.assert_close(mine, weight, rtol=1e-13, atol=1e-13)


def test_own_curve_groups_callbacks_and_flags_reach_a_run(capsys, tmp_path):
    from short_run import config, datasets
    from tiny import STYLES

    flags = parse(own_run.MyConfig, ["--half-life", "16", "--mark", "seen"])
    assert (flags.mine.half_life, flags.mine.mark) == (16, "seen")
    plain = config(STYLES["gpt2"], optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
    mine = own_run.MyConfig(**{f.name: getattr(plain, f.name) for f in fields(plain)}, mine=flags.mine)
    mine = replace(mine, checkpoint=replace(mine.checkpoint, save=str(tmp_path)), log=replace(mine.log, log_interval=1))
    seen = []

    class Told(Callback):
        def before_step(self, run):
            seen.append(("before", run.rate(), {n: p.detach().clone() for n, p in run.optimizer.params.items()}))

        def after_step(self, run, result):
            now = {n: (p.detach().clone(), p.main_grad.clone()) for n, p in run.optimizer.params.items()}
            seen.append(("after", now))

        def on_save(self, run, iteration):
            seen.append(("save", iteration))

    ours = own_run.hooks(mine)
    ours = replace(ours, callbacks=(*ours.callbacks, Told()))
    mine = replace(mine, batch=replace(mine.batch, train_iters=2), optimizer=replace(mine.optimizer, lr_warmup_iters=0))
    training = Training(mine, ProcessMesh.single(), gpt_provider, forward_step, datasets(), 127, 0.0, hooks=ours)
    training.train()
    said = capsys.readouterr().out
    assert [event[0] for event in seen] == ["before", "after", "before", "after", "save"]
    assert [event[1] for event in seen if event[0] == "before"] == pytest.approx([3e-3, 3e-3 * 0.5**0.5])
    assert "learning rate: 2.121320E-03" in said  # the log says the curve's rate, already that of the next step
    assert "seen 2: perplexity" in said
    for name in training.run.optimizer.state()["momentum"]:  # a tied head has none: its weight is the embedding's
        before = seen[0][2][name]
        after, grad = seen[1][1][name]
        factor = 0.5 if "embedding" in name else 1.0
        torch.testing.assert_close(after, before - 3e-3 * factor * grad)
