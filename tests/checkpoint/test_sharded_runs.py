"""Checkpoints of runs with weights in shards: each tensor is what a run without shards has, and loads."""

from dataclasses import replace
from functools import partial

import pytest
import saved_runs
import torch
from saved_runs import SHARDED, whole_tensors
from tiny import GPT2, LLAMA

PP2, TP2 = (2, 2, 1), (1, 2, 2)
FP8 = replace(LLAMA, fp8_format="hybrid", num_layers=2)
DELAYED = replace(FP8, fp8_recipe="delayed", fp8_amax_history_len=2, fp8_amax_compute_algo="max")
EXPERTS = replace(FP8, fp8_recipe="tensorwise", num_experts=4, moe_ffn_hidden_size=16)
BESIDE = {"async_save": True, "save_interval": 1}


@pytest.mark.parametrize(
    ("model", "eight", "saves", "loads"),
    [
        (replace(FP8, fp8_recipe="mxfp8"), False, BESIDE, {}),
        (DELAYED, True, {}, {}),
        (EXPERTS, True, BESIDE, {"no_load_optim": True}),
        (replace(FP8, fp8_recipe="blockwise"), True, {"no_save_optim": True}, {"finetune": True}),
    ],
    ids=["mxfp8", "delayed", "experts", "blockwise"],
)
def test_runs_in_8_bits_save_and_load_what_runs_without_shards_do(pool, tmp_path, model, eight, saves, loads):
    """Each goes on from the other's checkpoint, in another layout."""

    def run(name, mesh, sharded, steps, **checkpoint):
        parallel = SHARDED if sharded else {}
        used = replace(model, fp8_param_gather=eight and sharded)
        body = partial(saved_runs.trained, save=str(tmp_path / name), **checkpoint)
        pool.run(body, [mesh], used, parallel, steps, {"bf16": True})
        return whole_tensors(tmp_path / name / f"iter_{steps:07}")

    plain, sharded = (run(f"{split}", PP2, split, 2, **saves) for split in (False, True))
    assert plain.keys() == sharded.keys()
    assert differing(plain, sharded) == []
    steps = 2 if loads.get("finetune") else 3
    again = [
        run(f"{split} again", TP2, split, steps, load=str(tmp_path / f"{not split}"), **loads)
        for split in (False, True)
    ]
    assert again[0].keys() == again[1].keys()
    assert differing(*again) == []
    # The steps have trained: what is compared is not what was loaded.
    assert len(differing(plain, again[0])) > len(plain) / 2


def differing(one, other):
    return [key for key in one.keys() & other.keys() if not torch.equal(one[key], other[key])]


@pytest.mark.parametrize("parallel", [{}, SHARDED])
@pytest.mark.parametrize("frozen", [True, False])
def test_all_uses_of_a_weight_are_read_on_a_rank_without_its_owner(pool, tmp_path, parallel, frozen):
    """Of a frozen embedding only one of the last rank's uses was: head, and both ends of a depth."""
    model = replace(GPT2, mtp_num_layers=1)
    pool.run(partial(saved_runs.trained, save=str(tmp_path)), [PP2], model, {}, 2, {})
    assert pool.run(saved_runs.wrong_uses, [PP2], tmp_path, model, parallel, frozen) == [[]] * 4
