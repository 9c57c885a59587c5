"""What a caller of get_forward_backward_func can get wrong ends in a sentence; it ended in an assert or deep inside."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megapipe.config import ModelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.distributed.parallel_state import set_virtual_pipeline_model_parallel_rank
from megapipe.errors import ConfigError
from megapipe.models.moe.layer import MoE
from megapipe.pipeline_parallel.contracts.forward_backward import get_forward_backward_func
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import build
from megapipe.tensor_parallel.rng import dropout

CONFIG = SimpleNamespace(hidden_size=4, sequence_parallel=False)


class Plain(nn.Module):
    """A stage that is nobody's subclass and has no config."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.x = torch.ones(2, 1, 4) if x is None else x

    def forward(self) -> Tensor:
        return self.layer(self.x)


def step(mesh, *, model=None, num_microbatches=4, schedule="1f1b", pp_size=None, **more):
    return call(get_forward_backward_func(pp_size, mesh=mesh, schedule=schedule, **more), model, num_microbatches)


def call(run, model=None, num_microbatches=4, **more):
    return run(
        forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {"sum": out.sum().item()})),
        data_iterator=None,
        model=Plain() if model is None else model,
        num_microbatches=num_microbatches,
        seq_length=2,
        micro_batch_size=1,
        **more,
    )


def error(*, pp=1, **more):
    """What all ranks are told."""
    with pytest.raises(ConfigError) as caught:
        run_threads(lambda mesh: step(mesh, **more), pp=pp)
    return str(caught.value)


def test_a_plain_module_is_a_stage_when_the_configuration_is_given():
    first, last = run_threads(lambda mesh: step(mesh, config=CONFIG), pp=2)
    assert (len(first), len(last)) == (0, 4)


def test_a_plain_module_without_configuration_is_told_what_is_missing():
    assert error() == (
        "Plain has no `config` to say the size of messages: give get_forward_backward_func config=..., an object with "
        "hidden_size and sequence_parallel, or the model such an attribute."
    )


def test_another_pipeline_size_than_the_meshs_is_refused():
    assert error(pp_size=2) == (
        "get_forward_backward_func: pp_size is 2, and the mesh has 1 pipeline ranks. Leave pp_size out, or make the "
        "mesh with --pipeline-model-parallel-size of that size."
    )


@pytest.mark.parametrize("ranks, microbatches", [(1, 8), (2, 4)])
def test_a_table_of_another_size_is_refused(ranks, microbatches):
    assert (
        f"the schedule 1f1b is a table of {ranks} ranks and {microbatches} microbatches, and the step has 1 pipeline "
        "ranks and num_microbatches 4"
    ) in error(schedule=build("1f1b", ranks, microbatches), config=CONFIG)


def test_too_few_chunks_are_counted():
    assert error(schedule=build("zb-v", 1, 4), config=CONFIG) == (
        "pipeline rank 0 has 2 stages under the schedule zb-v: model and data_iterator must be lists of 2, one of each "
        "per stage, got 1 and 1."
    )


def test_parameters_of_two_types_are_refused_with_their_ranks():
    def body(mesh: ProcessMesh):
        return step(mesh, model=Plain().to(torch.bfloat16 if mesh.pp.rank else torch.float32), config=CONFIG)

    with pytest.raises(ConfigError) as caught:
        run_threads(body, pp=2)
    assert "parameters are of 2 types (pipeline rank 0: float32; pipeline rank 1: bfloat16)" in str(caught.value)


def test_a_stage_that_gives_something_else_than_hidden_states_is_told_of_both():
    """Its receiver would have ended in gloo's words, or read another tensor's bytes."""

    class Wide(Plain):
        def forward(self) -> Tensor:
            return super().forward().double() if self.double_ else super().forward()[:1]

    for double, found in ((True, "[2, 1, 4] of float64"), (False, "[1, 1, 4] of float32")):
        model = Wide()
        model.double_ = double
        assert error(pp=2, model=model, config=CONFIG) == (
            f"stage 0 of the model gives {found} in pass 0F0, and stages pass on [s, b, h] = [2, 1, 4] of float32, the "
            "type of config.pipeline_dtype or of all parameters. Let the forward of the stage return that."
        )


def test_a_module_that_takes_no_input_tensor_is_refused():
    model = nn.Linear(4, 4)
    assert error(model=model, config=CONFIG) == (
        "Linear has no set_input_tensor(x), by which a stage is given the hidden states of the one before it (None on "
        "the first). Add it to the model."
    )


class Noisy(Plain):
    """A stage that drops half of its output, and writes down which."""

    def __init__(self, masks: list[Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def forward(self) -> Tensor:
        out = dropout(super().forward(), 0.5, "noisy")
        self.masks.append(out.detach() == 0)
        return out


@pytest.mark.parametrize("keeps", [True, False], ids=["one function", "a function in each step"])
def test_each_step_draws_masks_of_its_own(keeps):
    """A function asked for in each step, as Megatron's train_step does, drew the same masks in all of them."""

    def masks_of(mesh, consumed):
        masks: list[Tensor] = []
        model = Noisy(masks)
        ask = partial(get_forward_backward_func, mesh=mesh, config=CONFIG)
        kept = ask()
        for number in range(3):
            given = {} if consumed is None else {"consumed_microbatches": consumed + 2 * number}
            call(kept if keeps else ask(), model, 2, **given)
        return torch.stack(masks)

    masks = masks_of(ProcessMesh.single(), None)
    assert len(masks.unique(dim=0)) == len(masks) == 6
    resumed = masks_of(ProcessMesh.single(), 2)
    assert torch.equal(resumed[:4], masks[2:])


def test_an_evaluation_leaves_the_masks_of_the_next_step_alone():
    """They were those of the step after it: a run that evaluates trained otherwise, and so did a resumed one."""

    def masks_of(evaluates):
        masks: list[Tensor] = []
        mesh, model = ProcessMesh.single(), Noisy(masks)
        run = get_forward_backward_func(mesh=mesh, config=CONFIG)
        call(run, model, 2)
        if evaluates:
            call(run, Plain(), 2, forward_only=True)
        call(run, model, 2)
        return torch.stack(masks)

    assert torch.equal(masks_of(True), masks_of(False))


def test_the_chunk_that_one_rank_is_at_asks_for_no_other_messages():
    """Megatron's code sets it on some ranks alone; that rank waited for the others to agree on messages anew."""

    def body(mesh):
        mesh.activate()
        run = get_forward_backward_func(config=CONFIG)
        call(run)
        if mesh.pp.rank:
            set_virtual_pipeline_model_parallel_rank(0)
        call(run)

    run_threads(body, pp=2, timeout_s=20)


def test_routers_remember_one_step():
    """What they saw of all steps stayed, and global_aux_loss was a mean over all of them."""
    config = ModelConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_experts=2,
        moe_ffn_hidden_size=4,
        moe_aux_loss_coeff=(0.1,),
    )
    model = Plain()
    model.layer = MoE(config, Axis(), 0)
    run = get_forward_backward_func(mesh=ProcessMesh.single(), config=CONFIG)
    seen = []
    for _ in range(3):
        call(run, model)
        seen.append(len(model.layer.router.seen))
    assert seen == [4, 4, 4], "microbatches of a step"
