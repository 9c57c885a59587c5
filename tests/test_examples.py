"""Each example does what it says: the seams that people extend, used from outside."""

import random
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import schedules  # noqa: E402

from examples import deepseek_pairs  # noqa: E402
from examples.deepseek_pairs import Stage  # noqa: E402
from megapipe.distributed.mesh import ProcessMesh  # noqa: E402
from megapipe.pipeline_parallel.threads import run_threads  # noqa: E402
from megapipe.schedule import build, simulate  # noqa: E402
from tools import fuzz_equivalence  # noqa: E402
from tools.equivalence import Case  # noqa: E402

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
def test_the_tool_knows_own_schedules(command, monkeypatch, capsys):
    size = [] if command == "list" else ["--pp", "4", "--microbatches", "8"]
    only = ["--only", "zb-h1"] if command == "compare" else []
    names = OWN[:1] if command == "show" else OWN
    monkeypatch.setattr(sys, "argv", ["schedules.py", command, *names, *size, *only])
    assert schedules.main() == 0
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
