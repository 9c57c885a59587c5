"""--fp8-param-gather: weights travel in eight bits, half the bytes, and every number stays what it is without it."""

from dataclasses import replace

import pytest
import torch
from short_run import config, datasets, run_of
from tiny import LLAMA

from megapipe.config import CheckpointConfig, Config
from megapipe.distributed.axis import Axis
from megapipe.distributed.device import Gauge
from megapipe.distributed.mesh import ProcessMesh
from megapipe.optim.sharded.eight_bits import InEightBits
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan.make import make_plan
from megapipe.plan.seconds.device import Device
from megapipe.plan.seconds.replicas import exposed
from megapipe.schedule.simulate import run_clock
from megapipe.tensor_parallel.fp8.products import Delayed, FP8Recipe, Scaled, products_of
from megapipe.training.hooks import Callback, Hooks

SHAPES = {"a.weight": (136, 24), "b.weight": (3, 16, 136), "c.weight": (16, 16)}
"""Of which shares of 2 to 4 ranks end within rows, experts and blocks of 128."""


def products_and_weights(kind: str) -> tuple[dict[str, Scaled], dict[str, torch.nn.Parameter]]:
    drawn = torch.Generator().manual_seed(0)
    made = {name: products_of(FP8Recipe("hybrid", kind, margin=1)) for name in SHAPES}
    for one in made.values():
        if isinstance(one, Delayed):
            one.amax_history.copy_(torch.tensor([[1.0], [0.5], [1.0]]))
    return made, {
        name: torch.nn.Parameter(torch.randn(shape, generator=drawn).bfloat16()) for name, shape in SHAPES.items()
    }


def seen(products: Scaled, weight: torch.Tensor) -> list[torch.Tensor]:
    """Both products of each matrix, and what a delayed scale will follow from."""
    found = []
    for one in weight.unbind() if weight.dim() == 3 else (weight,):
        r, k = one.shape
        found.append(products(torch.eye(k, dtype=torch.bfloat16), one))
        found.append(products.input_grad(torch.eye(r, dtype=torch.bfloat16), one))
    return [*found, *([products.seen[1]] if isinstance(products, Delayed) else [])]


@pytest.mark.parametrize("kind", ["tensorwise", "delayed", "blockwise"])
def test_ranks_that_quantise_their_shares_make_what_one_makes_of_the_whole(kind, monkeypatch):
    products, weights = products_and_weights(kind)
    wanted = {name: seen(products[name], weights[name].detach()) for name in SHAPES}
    sent = []
    start = Axis.start_all_gather
    monkeypatch.setattr(Axis, "start_all_gather", lambda own, x, into: (sent.append(x), start(own, x, into=into))[1])

    def rank(mesh):
        products, weights = products_and_weights(kind)
        flat = InEightBits(weights, products=products, live=Gauge(), replicas=mesh.dp_cp, distributed=True)
        flat.end_whole()
        assert all(weight.isnan().all() for weight in weights.values()), "nobody takes them for numbers"
        flat.start_gather()()
        with torch.no_grad():
            return {name: seen(products[name], weights[name]) for name in SHAPES}

    for dp in (2, 3, 4):
        for found in run_threads(rank, dp=dp):
            assert all(torch.equal(x, y) for name in SHAPES for x, y in zip(found[name], wanted[name], strict=True))
        assert {x.dtype for x in sent} == {torch.uint8}
        elements = sum(weight.numel() for weight in weights.values())
        assert elements <= sum(x.nbytes for x in sent) <= elements + 64 * dp
        sent.clear()


FP8 = replace(LLAMA, fp8_format="hybrid", num_layers=2)
DELAYED = replace(FP8, fp8_recipe="delayed", fp8_amax_history_len=2, fp8_amax_compute_algo="max")
EXPERTS = replace(FP8, fp8_recipe="tensorwise", num_experts=4, moe_ffn_hidden_size=16)
ZERO = {"use_distributed_optimizer": True}
OVERLAP = {**ZERO, "overlap_grad_reduce": True, "overlap_param_gather": True}
LATE = {**ZERO, "enable_optimizer_post_validation": True, "post_validation_after": 0}


def a_run(model, par=ZERO, steps=2, dp=2, pp=1, schedule="1f1b", **checkpoint) -> Config:
    run = config(model, dp=dp, pp=pp, schedule=schedule, bf16=True, clip_grad=0.5)
    return replace(
        run,
        parallel=replace(run.parallel, **par),
        batch=replace(run.batch, micro_batch_size=1, train_iters=steps),
        optimizer=replace(run.optimizer, lr_decay_iters=4),
        data=replace(run.data, eval_iters=1, eval_interval=1),
        checkpoint=CheckpointConfig(**checkpoint),
    )


class Told(Callback):
    """Numbers of the steps and evaluations, and weights."""

    def __init__(self) -> None:
        self.numbers, self.weights = [], list[torch.Tensor]()

    def after_step(self, run, result) -> None:
        self.numbers.append((result.losses["lm loss"], result.grad_norm))
        self.end(run)

    def end(self, run) -> None:
        self.weights += [x.clone() for module in run.modules for x in module.state_dict().values()]

    def on_evaluation(self, run, where, losses) -> None:
        self.numbers.append(losses)


def trained(run: Config) -> list[Told]:
    def rank(mesh: ProcessMesh) -> Told:
        told, late = Told(), run.parallel.enable_optimizer_post_validation  # which a callback would make wait
        training = run_of(mesh, run, Hooks(callbacks=() if late else (told,)))
        training.train()
        with training.run.optimizer.gathers.whole():
            told.end(training.run)
        return told

    pp = run.parallel.pipeline_model_parallel_size
    return run_threads(rank, dp=run.world_size // pp, pp=pp)


def same(one: list[Told], other: list[Told]) -> bool:
    """The same bits on every rank?"""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a.weights, b.weights, strict=True)]
    return [told.numbers for told in one] == [told.numbers for told in other] and all(
        torch.equal(x, y) and x.isfinite().all() for x, y in pairs
    )


@pytest.mark.parametrize(
    ("model", "how"),
    [
        (replace(FP8, fp8_recipe="blockwise"), {"pp": 2, "schedule": "dualpipe", "par": OVERLAP}),
        (DELAYED, {"par": LATE, "steps": 3}),
        (EXPERTS, {"par": {"use_megatron_fsdp": True}}),
    ],
    ids=["dualpipe", "updates that are undone", "experts zero-3"],
)
def test_a_run_trains_the_same_bits_with_it(model, how):
    datasets()
    assert same(trained(a_run(model, **how)), trained(a_run(replace(model, fp8_param_gather=True), **how)))


def test_a_run_goes_on_with_it_from_a_checkpoint_of_one_without(tmp_path):
    datasets()
    trained(a_run(DELAYED, steps=1, save=str(tmp_path), save_interval=1))
    eight = replace(DELAYED, fp8_param_gather=True)
    assert same(*(trained(a_run(model, load=str(tmp_path))) for model in (DELAYED, eight)))


def test_what_it_saves_one_rank_loads(tmp_path):
    datasets()
    eight = replace(DELAYED, fp8_param_gather=True)
    saved, *_ = trained(a_run(eight, steps=1, save=str(tmp_path), save_interval=1))
    (loaded,) = trained(a_run(eight, dp=1, steps=1, load=str(tmp_path)))
    assert all(torch.equal(x, y) for x, y in zip(saved.weights[-len(loaded.weights) :], loaded.weights, strict=True))


def test_the_plan_counts_a_share_of_the_weights_and_twice_their_bytes():
    """Of a weight: 2 bytes over 4 ranks, one of each of two products; 4 of gradient, 12 over 4 ranks."""
    (plain, of_plain), (eight, of_eight) = ((make_plan(run), run) for run in map(planned, (False, True)))
    layers = sum(x.parameters for x in eight.pieces.layers)
    assert plain.state_bytes[0] - eight.state_bytes[0] == pytest.approx(2 * 3 / 4 * layers)
    device = Device(inside=10e9)
    after, before = (
        exposed(plan, config, device, plan.schedule, run_clock(plan.schedule, plan.costs))
        for plan, config in ((plain, of_plain), (eight, of_eight))
    )
    assert after - before == pytest.approx(3 / 4 * layers / 10e9)


def planned(eight: bool) -> Config:
    run = a_run(replace(FP8, fp8_recipe="tensorwise", fp8_param_gather=eight), dp=4)
    return replace(run, batch=replace(run.batch, global_batch_size=8))
