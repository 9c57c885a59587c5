"""A step of the engine: what it tells its stages, where it takes no more than it is told, and what it refuses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel import engine
from megapipe.pipeline_parallel.contracts.forward_backward import get_forward_backward_func
from megapipe.pipeline_parallel.stage import PipelineStage
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import ScheduleError, build
from megapipe.tensor_parallel.rng import MicrobatchContext

STEP = {"data_iterator": None, "num_microbatches": 2, "seq_length": 1, "micro_batch_size": 1}


class Told(nn.Module):
    """One stage with all; of the engine's `Request` it writes down the randomness of each microbatch."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.config = SimpleNamespace(hidden_size=1, sequence_parallel=False, **config)

    def set_input_tensor(self, x: Tensor | None) -> None:
        assert x is None

    def forward(self) -> Tensor:
        return self.w * torch.ones(1, 1, 1)


@pytest.mark.parametrize(
    ("config", "kept"), [({}, []), ({"num_microbatches_with_partial_activation_checkpoints": 1}, [0, 1, 2])]
)
def test_microbatches_are_computed_again_but_those_that_the_config_keeps(
    config: dict[str, int], kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1F1B on one rank has one microbatch in flight at a time: each is the first of its window."""
    seen: list[MicrobatchContext] = []
    monkeypatch.setattr(MicrobatchContext, "activate", lambda self: seen.append(self))
    asked: list[PipelineStage] = []
    monkeypatch.setattr(PipelineStage, "finish", lambda self: asked.append(self))
    reported = get_forward_backward_func(mesh=ProcessMesh.single(), schedule="1f1b")(
        forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {"n": len(seen)})),
        data_iterator=None,
        model=Told(**config),
        num_microbatches=3,
        seq_length=1,
        micro_batch_size=1,
    )
    assert [one["n"] for one in reported] == [1, 2, 3]
    assert len(asked) == 1, "a step ends by asking its stages whether anything is left"
    assert [one.sample for one in seen] == [0, 1, 2]
    assert [n for n, one in enumerate(seen) if not one.recomputes] == kept


class Layers(Told):
    """It may be cut between its layers, of which it has none."""

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.x = torch.ones(1, 1, 1) if x is None else x

    def forward(self) -> Tensor:
        return self.w * self.x

    def between_layers(self, cut: Any) -> AbstractContextManager[None]:
        return nullcontext()


def test_links_are_opened_before_the_first_step_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    monkeypatch.setattr(engine.Messenger, "open_links", lambda self, placement: opened.append(placement.num_stages))
    run = get_forward_backward_func(mesh=ProcessMesh.single(), schedule="1f1b", config=SimpleNamespace(hidden_size=1))
    for microbatches in (2, 2, 4):
        run(
            forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {})),
            data_iterator=None,
            model=Layers(),
            num_microbatches=microbatches,
            seq_length=1,
            micro_batch_size=1,
        )
    assert opened == [1]


def test_microbatches_of_several_lengths_are_refused_only_where_the_vocabulary_is_shared() -> None:
    config = SimpleNamespace(hidden_size=1, variable_seq_lengths=True)

    def body(mesh: ProcessMesh) -> int:
        reported = get_forward_backward_func(mesh=mesh, schedule="1f1b", config=config)(
            forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {})),
            model=Layers(),
            **STEP,
        )
        return len(reported)

    assert run_threads(body, pp=2) == [0, 2]


def test_an_engine_that_is_told_no_more_trains_with_seed_0(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[MicrobatchContext] = []
    monkeypatch.setattr(MicrobatchContext, "activate", lambda self: seen.append(self))
    model = Layers()
    engine.ForwardBackward(ProcessMesh.single(), "1f1b", config=SimpleNamespace(hidden_size=1))(
        forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {})),
        model=model,
        **STEP,
    )
    assert [(one.seed, one.sample) for one in seen] == [(0, 0), (0, 1)]
    assert model.w.grad.item() == 1, "the mean of two losses, unscaled"


@pytest.mark.parametrize(("per_token", "weight"), [(False, 6 / 2), (True, 6 * 7)])
def test_a_layers_own_loss_of_seven_tokens_weighs_as_they_do(
    per_token: bool, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[MicrobatchContext] = []
    monkeypatch.setattr(MicrobatchContext, "activate", lambda self: seen.append(self))
    engine.ForwardBackward(ProcessMesh.single(), "1f1b", config=SimpleNamespace(hidden_size=1))(
        forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), torch.tensor(7), {})),
        model=Layers(),
        **STEP,
        calculate_per_token_loss=per_token,
        loss_scale=lambda: 6.0,
    )
    assert [one.weigh(7) for one in seen] == [weight] * 2


def test_an_engine_that_is_told_no_more_sends_no_shapes() -> None:
    def body(mesh: ProcessMesh) -> object:
        run = engine.ForwardBackward(mesh, "1f1b", config=SimpleNamespace(hidden_size=1))
        return run(
            forward_step_func=lambda _, model: (model().expand(5, 1, 1), lambda out: (out.sum(), {})),
            model=Layers(),
            **STEP,
        )

    with pytest.raises(ConfigError, match=r"gives \[5, 1, 1\] .* and stages pass on \[s, b, h\] = \[1, 1, 1\]"):
        run_threads(body, pp=2)


def test_a_table_of_ones_own_is_verified_before_its_first_step() -> None:
    table = build("1f1b", 1, 2)
    wrong = replace(table, name="mine", ranks=(table.ranks[0][:-1],))
    with pytest.raises(ScheduleError, match=r"mine is not valid:\n  rank 0: 0BW1 is missing"):
        get_forward_backward_func(mesh=ProcessMesh.single(), schedule=wrong, config=SimpleNamespace(hidden_size=1))(
            forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {})),
            model=Layers(),
            **STEP,
        )


def test_a_config_that_says_nothing_of_sequence_parallel_has_whole_sequences() -> None:
    def body(mesh: ProcessMesh) -> int:
        reported = get_forward_backward_func(mesh=mesh, schedule="1f1b", config=SimpleNamespace(hidden_size=1))(
            forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {"n": len(out)})),
            model=Layers(),
            **STEP,
        )
        return len(reported)

    assert run_threads(body, pp=2, tp=2) == [0, 0, 2, 2]


@pytest.mark.parametrize(("tp", "paired"), [(1, False), (2, True)])
def test_pairs_stay_pairs_where_passes_have_something_to_hide(tp: int, paired: bool) -> None:
    def body(mesh: ProcessMesh) -> bool:
        watch, run = (
            Stopwatch(mesh.device),
            engine.ForwardBackward(mesh, "dualpipe", config=SimpleNamespace(hidden_size=1)),
        )
        run(
            forward_step_func=lambda _, model: (model(), lambda out: (out.sum(), {})),
            data_iterator=[None] * 2,
            model=[Layers(), Layers()],
            num_microbatches=4,
            seq_length=1,
            micro_batch_size=1,
            stopwatch=watch,
        )
        return any(number == 2 for *_, number in watch.passes)

    assert run_threads(body, pp=2, tp=tp) == [paired] * 2 * tp
