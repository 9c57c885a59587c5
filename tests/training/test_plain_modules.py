"""The promise of docs/model_provider.md: any nn.Module can be a stage. Layers are torch's here, none has a Layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from megapipe.checkpoint.save_load import load_checkpoint, save_checkpoint
from megapipe.config import CheckpointConfig, ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import Layout, set_layout
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import CheckpointError, ConfigError
from megapipe.models.build import build_stage
from megapipe.optim.optimizer import Optimizer
from megapipe.partition.spans import LayerSpan
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build
from megapipe.testing import check_provider

from .plain import (
    ALL,
    HIDDEN,
    LAYERS,
    MODEL,
    RUN,
    Plain,
    frozen,
    frozen_gpt,
    oracle,
    provider,
    run,
    stages,
)


def test_initial_values_follow_name_and_seed_under_every_split_and_on_every_rank():
    # Each rank drew from its own global generator: sums of one weight were 4.57 and -4.16 on two data-parallel ranks.
    _, want, _ = oracle()
    assert len({tuple(x.flatten().tolist()) for x in want.values()}) == len(want)  # no two start equal
    for name, sizes in (
        ("gpipe", {}),
        ("1f1b", ALL),
        ("zb-v", {"pp": 2}),
        ("interleaved", {"pp": 2}),
        ("naive", {"pp": 4}),
    ):
        for start in run_threads(partial(run, name=name, steps=0), **sizes):
            assert all(torch.equal(value, want[key]) for key, value in start[1].items())
    again = build_stage(provider, MODEL, LayerSpan(1, 2, False, False), Axis(), 1)
    assert not torch.equal(again.layers["1"].mix.weight.double(), want["layers.1.mix.weight"])


def test_random_buffers_too():
    whole = build_stage(provider, MODEL, LayerSpan(0, LAYERS, True, True), Axis(), 1234)
    last = build_stage(provider, MODEL, LayerSpan(2, 2, False, True), Axis(), 1234)
    assert torch.equal(whole.layers["3"].shift, last.layers["3"].shift)


def test_the_users_own_generator_is_left_where_it_was():
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    build_stage(provider, MODEL, LayerSpan(0, 1, True, False), Axis(), 1234)
    assert torch.equal(torch.rand(3), want)


LAYOUTS = [("1f1b", ALL), ("zb-v", ALL), ("dualpipe", {"pp": 2})]


@pytest.mark.parametrize("name, sizes", LAYOUTS)
def test_training_is_plain_torchs(name, sizes):
    told, _, want = oracle()
    for rank in run_threads(partial(run, name=name), **sizes):
        assert rank[0] == pytest.approx(told, rel=1e-9)
        for key, value in rank[2].items():
            torch.testing.assert_close(value, want[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [frozen, frozen_gpt])
@pytest.mark.parametrize("name, sizes", [*LAYOUTS[1:], ("zb-h1", {"pp": 2, "dp": 2})])
def test_what_is_frozen_stays_and_the_rest_trains_as_in_plain_torch(name, sizes, make):
    """Under zb-h1 the first rank has nothing to train, and its B and W passes run all the same."""
    sizes = sizes if make is frozen else {axis: size for axis, size in sizes.items() if axis != "tp"}
    told, before, want = oracle(make)
    for rank in run_threads(partial(run, name=name, make=make), **sizes):
        assert rank[0] == pytest.approx(told, rel=1e-9)
        trained = {key for key in rank[2] if not torch.equal(want[key], before[key])}
        for key, value in rank[2].items():
            torch.testing.assert_close(value, want[key], rtol=1e-9, atol=1e-12)
            assert key in trained or torch.equal(value, before[key])
        assert all(views.keys() <= trained for views in rank[3].state().values())
        padded = sum(-(-view.numel() // 64) * 64 for view in rank[3].state()["exp_avg"].values())
        assert sum(flat.numel() for flat in rank[3].moments["exp_avg"]) == padded


def test_frozen_parameters_have_no_share_under_zero_1():
    told, _, want = oracle(frozen)
    for rank in run_threads(partial(run, name="zb-h1", make=frozen, distributed=True), pp=2, dp=2):
        assert rank[0] == pytest.approx(told, rel=1e-9)
        for key, value in rank[2].items():
            torch.testing.assert_close(value, want[key], rtol=1e-9, atol=1e-12)


def test_the_norm_of_parameters_counts_the_frozen():
    _, _, want = oracle(frozen)
    norm = sum(float(value.square().sum()) for value in want.values()) ** 0.5
    for *_, found in run_threads(partial(run, name="1f1b", make=frozen), pp=2, tp=2):
        assert found == pytest.approx(norm, rel=1e-12)


def test_a_model_with_nothing_to_train_is_refused_and_freeze_all_layers_runs_it():
    def nothing(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
        return Plain(span).requires_grad_(False)

    assert refusal(nothing, pp=2) == (
        "nothing is trained: every parameter of the model has requires_grad False. Leave some trained in the model "
        "provider, or run forwards alone with --freeze-all-layers"
    )
    told, before, after, *_ = run(ProcessMesh.single(), "1f1b", nothing, RUN.with_fields(freeze_all_layers=True))
    assert told[0] == pytest.approx(oracle()[0][0])
    assert told[1::2] == [0.0] * 3
    assert all(torch.equal(value, before[key]) for key, value in after.items())


def test_half_a_tie_cannot_be_frozen():
    def half(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
        stage = frozen_gpt(config, span, tp)
        if span.loss:
            stage.output_layer.weight.requires_grad_(True)
        return stage

    assert refusal(half, pp=2) == (
        "parameter embedding.word_embeddings.weight is frozen and tied to output_layer.weight, which is not: freeze "
        "both or none"
    )


def test_check_provider_takes_it():
    check_provider(provider, MODEL, schedules=["zb-v"], tensor_parallel=2)


def refusal(make, **sizes) -> str:
    with pytest.raises(ConfigError) as caught:
        run_threads(partial(run, name="1f1b", make=make), **sizes)
    return str(caught.value)


@pytest.mark.parametrize("axis, what", [("dp", "data-parallel"), ("tp", "tensor-parallel")])
def test_replicas_that_start_otherwise_are_named(axis, what):
    """A provider may draw by other means than torch's."""
    numbers = iter(range(100))

    def by_rank(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
        stage = Plain(span)
        if "2" in stage.layers:
            nn.init.constant_(stage.layers["2"].mix.bias, next(numbers))
        return stage

    text = refusal(by_rank, **{axis: 2})
    assert text.splitlines()[:2] == [
        "replicas of the model start with different values, and would stay different:",
        f"      layers.2.mix.bias on {what} ranks 0 and 1",
    ]


def test_a_value_that_depends_on_the_whole_stage_is_refused():
    def by_count(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
        stage = Plain(span)
        stage.register_parameter("scale", nn.Parameter(torch.ones(span.count)))
        return stage

    assert "the model provider makes scale for layers 0 to 3, and not, or in another shape" in refusal(by_count)


def test_a_checkpoint_loads_after_freezing_and_the_other_way_round_says_how(tmp_path):
    config, single = RUN, ProcessMesh.single()
    counters = {"consumed_train_samples": 0, "consumed_valid_samples": 0}

    def fresh(make):
        modules = stages(single, build("1f1b", 1, 1), make)
        return modules, Optimizer(modules, config.optimizer, single)

    folders = {
        make: save_checkpoint(tmp_path / make.__name__, 1, *fresh(make), counters, config, single)
        for make in (provider, frozen)
    }
    load_checkpoint(folders[provider], *fresh(frozen), config, single)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folders[frozen], *fresh(provider), config, single)
    assert "iter_0000001 lacks state of parameters that were frozen then (add --no-load-optim): " in str(caught.value)
    without = replace(config, checkpoint=CheckpointConfig(no_load_optim=True))
    load_checkpoint(folders[frozen], *fresh(provider), without, single)


def test_a_layout_of_another_size_is_refused():
    def wrong(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
        stage = Plain(span)
        for layer in stage.layers.values():
            set_layout(layer.gain, Layout((HIDDEN,), 0))
        return stage

    assert (
        "gain has 8 elements on a tensor-parallel rank, and its Layout says [8], split over 2 ranks in dimension"
        in (refusal(wrong, pp=2, tp=2))
    )


def test_a_provider_that_reads_values_while_it_builds_is_refused():
    def reads(config: ModelConfig, span: LayerSpan, tp: Axis) -> nn.Module:
        stage = Plain(span)
        assert stage.layers[str(span.first)].gain.sum().item() != 0
        return stage

    assert "the model provider cannot build the whole model without storage, on torch's meta device" in refusal(reads)
