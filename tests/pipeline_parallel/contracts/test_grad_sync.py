"""What a Megatron config asks for around a step is done with what it asks for, or refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megapipe.distributed.axis import Axis
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.contracts.grad_sync import GradSync, check_config

MESH: Any = SimpleNamespace(tp=Axis(0, 2), pp=Axis(0, 3), cp=Axis(0, 4))
CHUNKS = {2: nn.Linear(1, 1), 5: nn.Linear(2, 2, bias=False)}


@pytest.mark.parametrize(
    "name",  # of Megatron-LM's ModelParallelConfig and TransformerConfig, what its schedules read
    ["cpu_offloading", "defer_embedding_wgrad_compute", "delay_wgrad_compute", "enable_autocast", "mtp_num_layers",
     "fine_grained_activation_offloading", "hybrid_context_parallel", "moe_paged_stash", "num_moe_experts",
     "overlap_moe_expert_parallel_comm"],
)  # fmt: skip
def test_what_megatrons_schedules_act_on_and_ours_do_not_is_refused(name: str) -> None:
    for off in (None, False, 0):
        check_config(SimpleNamespace(**{name: off}), MESH)
    with pytest.raises(ConfigError) as caught:
        check_config(SimpleNamespace(**{name: 2}), MESH)
    assert str(caught.value) == f"config.{name} is 2, which megapipe's schedules do not implement"


def test_sizes_are_the_meshs_and_all_that_is_wrong_is_told_at_once() -> None:
    axes = {"tensor_model": 2, "pipeline_model": 3, "context": 4}
    check_config(SimpleNamespace(**{f"{axis}_parallel_size": size for axis, size in axes.items()}), MESH)
    check_config(SimpleNamespace(**{f"{axis}_parallel_size": 1 for axis in axes}), MESH)
    with pytest.raises(ConfigError) as caught:
        check_config(SimpleNamespace(**{f"{axis}_parallel_size": 6 for axis in axes}), MESH)
    assert list(caught.value.problems) == [
        f"config.{axis}_parallel_size is 6, and the mesh has {size}" for axis, size in axes.items()
    ]


def test_parameters_are_gathered_chunk_by_chunk_before_a_step_that_trains_or_not() -> None:
    seen: list[tuple[str, list[nn.Parameter]]] = []
    config = SimpleNamespace(
        param_sync_func=[lambda params, name=name: seen.append((name, list(params))) for name in "ab"]
    )
    for training in (True, False):
        with GradSync(config, CHUNKS).off(training):
            assert seen == [("a", list(CHUNKS[2].parameters())), ("b", list(CHUNKS[5].parameters()))]
        seen.clear()


def test_gradients_of_a_chunk_are_synchronised_by_its_own_function_when_it_is_done() -> None:
    seen: list[tuple[str, list[nn.Parameter]]] = []
    config = SimpleNamespace(
        grad_sync_func=[lambda params, name=name: seen.append((name, list(params))) for name in "ab"]
    )
    sync = GradSync(config, CHUNKS)
    with sync.off(True):
        assert seen == []
        sync.on_stage_done(5)
        sync.on_stage_done(2)
    assert seen == [("b", list(CHUNKS[5].parameters())), ("a", list(CHUNKS[2].parameters()))]


def test_behind_a_step_synchronisation_is_on_again_also_where_the_step_failed() -> None:
    """Else what the next step of another program reduces would stay on its rank."""
    seen: list[str] = []

    @contextmanager
    def no_sync() -> Iterator[None]:
        seen.append("off")
        yield
        seen.append("on")

    sync = GradSync(SimpleNamespace(no_sync_func=[no_sync, no_sync]), CHUNKS)
    with suppress(KeyError), sync.off(True):
        raise KeyError
    assert seen == ["off", "off", "on", "on"]


@pytest.mark.parametrize("name", ["grad_sync_func", "param_sync_func", "no_sync_func"])
def test_a_function_for_each_chunk_and_no_other_number(name: str) -> None:
    for many in (3, 1):
        if (name, many) != ("no_sync_func", 1):  # one that opens and closes all
            with pytest.raises(ConfigError) as caught:
                GradSync(SimpleNamespace(**{name: [print] * many}), CHUNKS)
            assert str(caught.value) == (
                f"config.{name} has {many} functions for 2 model chunks; give one of each per chunk"
            )
    GradSync(SimpleNamespace(**{name: (print, print)}), CHUNKS)
    GradSync(SimpleNamespace(**{name: None}), CHUNKS)


def test_finalize_model_grads_func_is_given_the_keywords_that_it_names() -> None:
    tokens, groups = torch.ones(1), object()
    chunks = list(CHUNKS.values())

    def given(finalize: Any) -> None:
        GradSync(SimpleNamespace(finalize_model_grads_func=finalize), CHUNKS).finalize(tokens, groups, True)

    seen: list[tuple[Any, ...]] = []
    given(lambda model, num_tokens: seen.append((model, num_tokens)))
    given(lambda model, num_tokens, force_all_reduce: seen.append((model, num_tokens, force_all_reduce)))
    given(lambda model, num_tokens, pg_collection=None: seen.append((model, num_tokens, pg_collection)))
    given(lambda *args, **more: seen.append((*args, more)))
    assert seen == [
        (chunks, tokens), (chunks, tokens, True), (chunks, tokens, groups),
        (chunks, tokens, {"pg_collection": groups, "force_all_reduce": True}),
    ]  # fmt: skip
    GradSync(SimpleNamespace(), CHUNKS).finalize(tokens, groups, True)
