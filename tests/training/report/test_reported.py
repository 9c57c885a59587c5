"""What loss_func returns: its loss and its tokens train, what it reports is only shown."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megapipe.config import BatchConfig, Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megapipe.distributed.axis import Pending
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError, RanksDiffer
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rule import Rates
from megapipe.pipeline_parallel.loss import Loss
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build
from megapipe.training.evaluation import evaluate
from megapipe.training.report.moment import Window
from megapipe.training.steps.stages import Stages
from megapipe.training.steps.step import StepResult, train_step
from megapipe.training.steps.totals import Adder

M, B, S, V, EOD = 3, 2, 5, 7, 0
TOKENS = torch.randint(0, V, (2 * M, B, S + 1), generator=torch.Generator().manual_seed(1))


class Bigram(nn.Module):
    """Logits of the next token from a table, float64: its loss and gradient have a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.config = ModelConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
        self.table = nn.Parameter(torch.linspace(-1, 1, V * V, dtype=torch.float64).view(V, V).sin())

    def set_input_tensor(self, x: Tensor | None) -> None:
        pass

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.table[tokens].flatten(0, 1), labels.flatten(), reduction="none")


def forward_step(data: Any, model: nn.Module, *, report: Any, tokens_as: Any) -> Any:
    batch = next(data)
    losses = model(batch.tokens, batch.labels) * batch.loss_mask.flatten()
    count = tokens_as(batch.loss_mask.sum())
    return losses, lambda losses: (losses.sum(), count, report(losses.sum().detach(), batch.loss_mask.sum(), model))


def lm_loss(total: Tensor, count: Tensor, _: nn.Module) -> dict[str, Any]:
    return {"lm loss": torch.stack((total, count))}


def pipeline(mesh: ProcessMesh, step: Any, *, per_token: bool = True, microbatches: int = M) -> Stages:
    config = Config(
        model=ModelConfig(num_layers=1, hidden_size=1, num_attention_heads=1),
        parallel=ParallelConfig(),
        batch=BatchConfig(
            micro_batch_size=B,
            global_batch_size=B * microbatches * mesh.dp.size,
            seq_length=S,
            train_iters=3,
            calculate_per_token_loss=per_token,
        ),
        optimizer=OptimizerConfig(lr=1e-2, clip_grad=0),
        data=DataConfig(eod_mask_loss=True),
        world_size=mesh.world.size,
    )
    return Stages(config, build("1f1b", 1, microbatches), [Bigram()], step, mesh, EOD)


def trained(
    mesh: ProcessMesh, report: Any = lm_loss, tokens_as: Any = lambda n: n
) -> tuple[StepResult, Tensor, Tensor]:
    """One step: its result, the gradient and the weights after it."""
    run = pipeline(mesh, partial(forward_step, report=report, tokens_as=tokens_as))
    optimizer = Optimizer(run.modules, run.config.optimizer, mesh)
    rank, size = mesh.dp.rank, mesh.dp.size
    result = train_step(run, optimizer, list(TOKENS[rank : M * size : size]), 0, Rates(1e-2))
    return result, optimizer.buffers[0].grads.clone(), optimizer.buffers[0].main.clone()


METRICS = {
    "mean": lambda total, count, _: {"accuracy": torch.tensor(0.5)},
    "its own loss as a mean": lambda total, count, _: {"lm loss": total / count},
    "a float": lambda total, count, _: {"accuracy": 0.5},
    "a pair of floats": lambda total, count, _: {"accuracy": (3.0, 7)},
    "sum and another count": lambda total, count, _: {"accuracy": torch.tensor([3.0, 7.0])},
    "count 0": lambda total, count, _: {"accuracy": torch.tensor([0.0, 0.0])},
    "a pair of count 0": lambda total, count, _: {"accuracy": (0.0, 0.0)},
    "nan": lambda total, count, _: {"accuracy": torch.tensor(math.nan)},
    "inf": lambda total, count, _: {"zz": math.inf},
    "nothing": lambda total, count, _: {},
}
COUNTS = {
    "an int": lambda n: int(n),
    "a float": lambda n: float(n),
    "an int tensor": lambda n: n.to(torch.int),
    "a tensor [1]": lambda n: n.view(1),
}


@pytest.mark.parametrize("form", METRICS)
def test_what_is_reported_does_not_reach_the_gradient(form):
    """It once did: per-token loss was divided by the count of the name that sorts first, 4 of microbatches for 256."""
    plain, gradient, weights = trained(ProcessMesh.single())
    result, with_it, after = trained(ProcessMesh.single(), lambda *args: METRICS[form](*args))
    assert torch.equal(with_it, gradient)
    assert torch.equal(after, weights)
    assert (result.skipped, result.tokens, result.grad_norm) == (False, plain.tokens, plain.grad_norm)


@pytest.mark.parametrize("form", COUNTS)
def test_tokens_may_be_any_number(form):
    """An int once ended in: 'int' object has no attribute 'clamp'."""
    _, gradient, _ = trained(ProcessMesh.single())
    assert torch.equal(trained(ProcessMesh.single(), tokens_as=COUNTS[form])[1], gradient)


def formula(tokens: Tensor) -> tuple[Tensor, float]:
    """The gradient of the mean over all tokens but those after an end of document, [V, V], and their number."""
    gradient, count = torch.zeros(V, V, dtype=torch.float64), 0
    table = Bigram().table.detach()
    for row in tokens.flatten(0, 1).tolist():
        for token, label in pairwise(row):
            if token != EOD:
                gradient[token] += table[token].softmax(0) - nn.functional.one_hot(torch.tensor(label), V)
                count += 1
    return gradient / count, count


def test_per_token_loss_is_the_mean_over_all_tokens():
    expected, count = formula(TOKENS)
    for result, gradient, _ in run_threads(trained, dp=2):
        assert result.tokens == count
        torch.testing.assert_close(gradient[: V * V].view(V, V), expected, rtol=1e-12, atol=1e-14)


def step_with(loss_func: Any) -> Any:
    def forward_step(data: Any, model: nn.Module) -> tuple[Tensor, Any]:
        batch = next(data)
        return model(batch.tokens, batch.labels), loss_func

    return forward_step


def test_without_a_token_count_per_token_loss_is_refused():
    run = pipeline(ProcessMesh.single(), step_with(lambda x: (x.mean(), {})))
    with pytest.raises(ConfigError, match="--calculate-per-token-loss divides by the number of tokens, and loss_func"):
        run.run(list(TOKENS[:M]), 0)


def test_a_stage_with_the_loss_needs_a_loss_func():
    run = pipeline(ProcessMesh.single(), step_with(None))
    with pytest.raises(ConfigError, match=r"forward_step must return \(output, loss_func\) on the stage with the loss"):
        run.run(list(TOKENS[:M]), 0)


def test_a_loss_that_is_not_finite_skips_the_step_whatever_is_reported():
    bad = step_with(lambda x: (x.sum() * math.nan, 4, {"lm loss": 1.0}))
    run = pipeline(ProcessMesh.single(), bad)
    optimizer = Optimizer(run.modules, run.config.optimizer, ProcessMesh.single())
    before = optimizer.buffers[0].main.clone()
    result = train_step(run, optimizer, list(TOKENS[:M]), 0, Rates(1e-2))
    assert (result.skipped, result.finite, result.losses) == (True, False, {"lm loss": 1.0})
    assert torch.equal(optimizer.buffers[0].main, before)


def test_training_and_evaluation_may_report_other_names():
    """The names of the first call were once kept: others vanished, a missing one was a KeyError."""

    def report(total: Tensor, count: Tensor, model: nn.Module) -> dict[str, Any]:
        return {"z loss": 2.0, "lm loss": total / count} if model.training else {"accuracy": 3.0}

    def losses(mesh: ProcessMesh) -> list[dict[str, float]]:
        run = pipeline(mesh, partial(forward_step, report=report, tokens_as=int))
        batch = list(TOKENS[:M])
        return [run.run(batch, n, evaluate=n % 2 == 1)().means for n in range(4)]

    for first, second, third, fourth in run_threads(losses, dp=2):
        assert list(first) == ["lm loss", "z loss"]
        assert (first, second) == (third, fourth) == (first, {"accuracy": 3.0})


def test_a_name_may_appear_later_and_on_one_rank_only():
    def losses(mesh: ProcessMesh) -> list[dict[str, float]]:
        adder = Adder(mesh)
        steps = []
        for n in range(3):
            extra = {"image loss": (6.0, 2.0)} if n == 1 and mesh.dp.rank == 1 else {}
            loss = Loss(torch.ones(()), None, {"lm loss": 1.0 + mesh.dp.rank, **extra})
            steps.append(adder.start([loss], n, evaluate=False)().means)
        return steps

    with_image = {"image loss": 3.0, "lm loss": 1.5}
    assert run_threads(losses, dp=2) == [[{"lm loss": 1.5}, with_image, {"lm loss": 1.5}]] * 2


def test_the_line_averages_a_name_over_the_steps_that_report_it():
    window = Window()
    for losses, skipped in (({"a": 1.0, "b": 5.0}, False), ({"a": 3.0}, False), ({"a": math.inf}, True)):
        window.add(StepResult(losses, 1.0, 0.0, skipped, finite=not skipped))
    assert window.losses == {"a": 2.0, "b": 5.0}
    assert window.nan == 1, "an infinite loss counts too, as in Megatron-LM"


def test_validation_is_a_sum_over_a_sum():
    """Batches of 3, 0 and 12 counted tokens: the mean of their means was nan."""
    mesh = ProcessMesh.single()
    run = pipeline(mesh, partial(forward_step, report=lm_loss, tokens_as=int), microbatches=1)
    rows = torch.full((3, 1, B, S + 1), EOD)
    rows[0, 0, 0, :3], rows[2, 0, :, :] = 3, torch.arange(1, 1 + S + 1)
    losses = evaluate(run, lambda consumed: list(rows[consumed // B]), 0, 3)
    table, total, count = Bigram().table.detach(), 0.0, 0
    for token, label in [(3, 3), (3, 3), (3, EOD), *[(i, i + 1) for i in range(1, S + 1)] * 2]:
        total += (table[token].logsumexp(0) - table[token, label]).item()
        count += 1
    assert losses == {"lm loss": pytest.approx(total / count, rel=1e-12)}


class _Reads(TorchFunctionMode):
    """Counts what waits for a device: values that come to the host."""

    NAMES = ("cpu", "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(function, "__name__", "") in self.NAMES
        return function(*args, **(kwargs or {}))


def test_what_is_reported_comes_to_the_host_once_per_step():
    """Of GPUs, each reading waits for all that was enqueued; it was one for every microbatch and name."""
    adder = Adder(ProcessMesh.single())
    reported = {f"loss {n}": torch.ones(2) for n in range(4)}
    with _Reads() as reads:
        adder.start([Loss(torch.ones(()), torch.tensor(3), reported)] * 8, 0, evaluate=False)()
    assert reads.count == 1


class _World:
    """A world of many ranks that all hold what this one has, but for one."""

    def __init__(self, size: int, other: Tensor | None = None) -> None:
        self.size, self.other = size, other
        self.gather_json = lambda value: [value]

    def start_all_reduce(self, rows: Tensor) -> Pending:
        self.rows = rows.clone()
        other = rows if self.other is None else self.other
        return Pending(rows * (self.size - 1) + other)


def rows_of(sample: int, world: _World) -> Tensor:
    """What a rank at this sample adds up with the others; all compare their places."""
    mesh: Any = replace(ProcessMesh.single())
    object.__setattr__(mesh, "world", world)
    Adder(mesh).start([], sample, evaluate=False)()
    return world.rows


@pytest.mark.parametrize("size", [2, 8193, 100_000])
@pytest.mark.parametrize("apart", [1, 1024, 4096 * 2**20])
def test_ranks_at_one_place_are_seen_as_such_in_any_number_and_others_are_not(size, apart):
    """Squares were exact up to 8,192 ranks, then a sound run could be stopped. Places a multiple of 2^25 samples apart
    were taken for one: of batches of 4096 after 8,192 steps."""
    sample = 33_554_431
    rows_of(sample, _World(size))
    rows_of(131_070 // 2, _World(size))  # the largest remainder
    with pytest.raises(RanksDiffer, match="different places"):
        rows_of(sample, _World(size, rows_of(sample + apart, _World(1))))
