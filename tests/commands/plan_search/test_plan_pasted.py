"""The flags of a search's plans, appended to a script's own flags, make these plans."""

from __future__ import annotations

import json
import re

import pytest
from small_searches import MODEL, found_by, run_search

from megapipe.commands.plan.main import main
from megapipe.commands.plan.pasted import flags_of, left_out
from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.training.check import check


def test_flags_of_a_search_pasted_make_the_plan_that_it_promised(capsys, tmp_path):
    """A search said 76.8 GiB where a run with its flags has 52.8, and 62.6 where it has 79.3."""
    own = (
        "--global-batch-size 8 --world-size 4 --rates rates.json --use-megatron-fsdp --num-experts 4 "
        "--sequence-parallel --overlap-grad-reduce"
    )
    own = own.replace("rates.json", str(tmp_path / "rates.json"))
    (tmp_path / "rates.json").write_text(json.dumps({"flops": 1e11, "inside": 1e9, "outside": 1e8, "node": 2}))
    best, said = run_search(f"{own} --memory-gib 0.02 --search-jobs 2", capsys, tmp_path, without="")
    assert len(best) > 3
    for found in best:
        flags = " ".join(found["flags"])
        assert flags in said.out
        split = "--tensor-model-parallel-size 1" not in flags
        # One rank has nothing to split, so the flag may stay there.
        assert ("--sequence-parallel" in flags) == split
        assert not re.search("--unset[^-]*sequence-parallel", flags)
        out = tmp_path / "one.json"
        main([*MODEL.split(), *own.split(), *found["flags"], "--json", str(out)])
        made = json.loads(out.read_text())
        assert made["plan"] == found["plan"]
        assert made["step"]["predicted"]["seconds"] == found["step_s"]
        assert max(made["peak_bytes"]) == found["peak_bytes"]


def test_a_check_of_pasted_flags_predicts_the_seconds_of_the_search(capsys, tmp_path):
    """A search by A100s said 7.434 s, and a check of its flags 2.836 s, by an H100's rates."""
    own = "--global-batch-size 8 --num-experts 4 --world-size 4"
    best, _ = run_search(f"{own} --rates a100 --search-jobs 1 --among tp=1 micro=1", capsys, tmp_path)
    for found in (best[0], best[-1]):
        check(parse(Config, [*MODEL.split(), *own.split(), *found["flags"], "--check"]))
        assert f"predicted step {found['step_s']:.4g} s" in capsys.readouterr().out


OWN_CHOICES = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --tensor-model-parallel-size 2 "
    "--sequence-parallel --tp-comm-overlap --pipeline-model-parallel-size 2 "
)


@pytest.mark.parametrize(
    "own",
    [
        f"{OWN_CHOICES} --num-layers-per-virtual-pipeline-stage 1 --overlap-grad-reduce --use-distributed-optimizer",
        f"{OWN_CHOICES} --enable-zero-bubble --zero-bubble-v-schedule --use-megatron-fsdp",
        "--moe-layer-recompute --num-experts 4 --pipeline-model-parallel-size 2 "
        "--pipeline-model-parallel-layout Et|3tL",
    ],
)
def test_flags_of_a_plan_appended_to_a_script_win_whatever_stands_in_it(own, capsys, tmp_path):
    """Full recomputation of a script stayed, and 10.82 s became 14.34 without a word."""
    line = f"{own} --global-batch-size 8 --world-size 4 --rates a100"
    best, said = run_search(f"{line} --search-jobs 2", capsys, tmp_path)
    assert len(best) > 3
    assert "without these of yours" not in said.out
    assert any("--recompute-granularity" not in x["flags"] for x in best)
    for found in best:
        check(parse(Config, [*MODEL.split(), *line.split(), *found["flags"], "--check"]))
        checked = capsys.readouterr().out
        assert f"\nplan {found['plan']}\n" in checked
        assert f"predicted step {found['step_s']:.4g} s" in checked


def test_how_much_is_recomputed_leaves_with_what_is():
    """--recompute-method stayed where --recompute-granularity was to be left out."""
    own = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
    words = [*MODEL.split(), *own.split(), "--global-batch-size", "4"]
    found = found_by(f"{own} --global-batch-size 4", 1)
    for x in found.best.values():
        left = left_out(parse(Config, [*words, *flags_of(x.config)]), x.config)
        recomputes_all = x.config.model.recompute_granularity == "full"
        names = ["--recompute-granularity", "--recompute-method", "--recompute-num-layers"]
        if x.config.model.recompute_granularity == "selective":
            names = names[1:]
        assert left == ([] if recomputes_all else names)


LATE = "--enable-optimizer-post-validation"


def test_post_validation_stays_in_plans_that_a_run_accepts_with_it(capsys, tmp_path):
    """Each plan of a zb-h2 user's search took it back, so that his step alone was timed without a barrier."""
    (tmp_path / "rates.json").write_text(json.dumps({"flops": 1e11, "inside": 1e9, "outside": 1e8, "node": 2}))
    line = f"--global-batch-size 16 --world-size 4 --pipeline-model-parallel-size 4 --rates {tmp_path / 'rates.json'}"
    line += f" --pipeline-schedule zb-h2 {LATE} --post-validation-after 3"
    few = "--memory-gib 0.02 --reserved-gib 0 --among tp=1 cp=1 micro=1 recompute=none pp=1,4"
    best, said = run_search(f"{line} {few}", capsys, tmp_path)
    refused = [not {"--use-megatron-fsdp", "--vocab-parallel-pipeline"}.isdisjoint(x["flags"]) for x in best]
    assert {*refused} == {True, False}
    for found, without in zip(best, refused, strict=True):
        assert (LATE in found["flags"]) != without
        assert found["leave_out"] == [LATE, "--post-validation-after"] * without
        check(parse(Config, [*MODEL.split(), *line.split(), *found["flags"], "--check"]))
        checked = capsys.readouterr().out
        assert f"\nplan {found['plan']}\n" in checked
        assert f"predicted step {found['step_s']:.4g} s" in checked
    assert said.out.count(", without a barrier") == refused.count(False) + len(["yours"])
    assert "without a barrier: the seconds from the end of a step to the end of the next" in said.out


def test_post_validation_that_a_run_refuses_in_every_layout_is_taken_back(capsys, tmp_path):
    line = f"--global-batch-size 4 --world-size 2 --mtp-num-layers 1 {LATE}"
    best, _ = run_search(line, capsys, tmp_path)
    assert best
    assert all(x["leave_out"] == [LATE] for x in best)
