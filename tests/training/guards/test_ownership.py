"""A run whose stages are not the model stops before its first step, whoever built them wrongly."""

from dataclasses import replace
from functools import partial

import pytest
from tiny import LAYERS, STYLES
from torch import nn

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.models.provider import gpt_provider
from megapipe.partition.spans import LayerSpan, partition
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import Placement, loop, mirror, vee
from megapipe.training.guards.model import check_ownership

MODEL = STYLES["gpt2"]


def check(mesh: ProcessMesh, placement: Placement, change=lambda span: span, model=MODEL) -> list[int] | str:
    """Parameters of each stage, or what is said when the spans that are built are not those of the split."""
    spans = partition(LAYERS, placement)
    modules = [gpt_provider(model, change(spans[stage]), mesh.tp) for stage in placement.stages_on(mesh.pp.rank)]
    try:
        return check_ownership(modules, model, gpt_provider, placement, mesh)
    except ConfigError as error:
        return str(error)


def on_two_ranks(placement: Placement, **how) -> list[int] | str:
    """The one answer that both ranks give."""
    first, second = run_threads(partial(check, placement=placement, **how), pp=2, timeout_s=30)
    assert first == second
    return first


@pytest.mark.parametrize("style", STYLES)
def test_parameters_of_all_stages_are_those_of_the_model(style):
    model = STYLES[style]
    whole = sum(p.numel() for p in gpt_provider(model, LayerSpan(0, LAYERS, True, True), ProcessMesh().tp).parameters())
    assert sum(on_two_ranks(loop(2, 2), model=model)) == whole
    assert sum(on_two_ranks(vee(2), model=model)) == whole
    assert sum(on_two_ranks(mirror(2), model=model)) == 2 * whole
    (answer, _) = run_threads(partial(check, placement=loop(1), model=model), tp=2, timeout_s=30)
    assert answer == [whole]


def test_a_layer_that_no_stage_built_stops_every_rank():
    text = on_two_ranks(loop(2), change=lambda span: replace(span, count=1))
    assert text.splitlines()[1:] == ["      decoder.layers.1 is on no stage", "      decoder.layers.3 is on no stage"]


def test_a_layer_without_parameters_is_missed_too():
    model = replace(MODEL, per_layer_overrides='{"3": {"no_mlp": true, "no_attention": true}}')
    text = on_two_ranks(loop(2), change=lambda span: replace(span, count=2 - span.loss), model=model)
    assert text.splitlines()[1:] == ["      decoder.layers.3 is on no stage"]


def test_a_layer_built_twice_is_named_with_both_stages():
    text = on_two_ranks(loop(2), change=lambda span: replace(span, count=3 - span.loss))
    assert text.splitlines()[1:] == ["      decoder.layers.2 is on stages 0 and 1"]


def test_each_direction_of_a_mirror_must_be_whole():
    text = on_two_ranks(mirror(2), change=lambda span: replace(span, loss=False))
    assert text.count("output_layer.weight is on no stage") == 2


def test_a_head_of_another_shape_is_named():
    def provider(config, span, tp):
        # A user's provider that rounds the vocabulary by itself, but only where it splits the model.
        return gpt_provider(config if span.count == LAYERS else replace(config, padded_vocab_size=128), span, tp)

    def body(mesh):
        spans = partition(LAYERS, loop(2))
        check_ownership([provider(MODEL, spans[mesh.pp.rank], mesh.tp)], MODEL, provider, loop(2), mesh)

    with pytest.raises(
        ConfigError, match=r"output_layer.weight has shape \[128, 32\] on stage 1 and \[64, 32\] in the"
    ):
        run_threads(body, pp=2, timeout_s=30)


@pytest.mark.parametrize("own", [False, True])
def test_a_layer_that_does_not_see_the_tokens_of_other_ranks_stops_every_rank(own):
    """Ranks of the other stage waited for those that have the layer."""

    def checked(mesh: ProcessMesh) -> list[int] | str:
        module = gpt_provider(MODEL, partition(LAYERS, loop(2))[mesh.pp.rank], mesh.tp)
        if own and "3" in module.decoder.layers:
            module.decoder.layers["3"] = nn.Linear(1, 1)
        try:
            return check_ownership([module], MODEL, gpt_provider, loop(2), mesh)
        except ConfigError as error:
            return str(error)

    answers = run_threads(checked, cp=2, pp=2, timeout_s=30)
    refused = "--context-parallel-size 2: decoder.layers.3 is a Linear, which does not meet the keys of other ranks."
    assert [str(answer).startswith(refused) for answer in answers] == [own] * 4
