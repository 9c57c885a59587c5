"""Plans of a search whose vocabulary all pipeline ranks share."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from small_searches import MODEL, SLOW, run_search

from megapipe.commands.plan.main import main
from megapipe.commands.plan.search.final import of_run
from megapipe.commands.plan.search.shared import worth_it
from megapipe.config import Config
from megapipe.flags.parse import parse

FLAG = "--vocab-parallel-pipeline"
LINE = "--global-batch-size 8 --world-size 4 --vocab-size 8000 --padded-vocab-size 8192 "
LINE += "--without sharding moves hiding"
RATES = {"flops": 1e11, "inside": 1e9, "outside": 1e9, "overhead": 1e-6, "latency": 1e-6}
DEEP = "--num-layers 8 --fix recompute --among pp=4 micro=1 schedule=1f1b,zb-v"


@pytest.fixture
def line(tmp_path):
    """Flags of a search on slow devices, whose small model still takes longer than the start of its passes."""
    (tmp_path / "rates.json").write_text(json.dumps(RATES))
    return f"--rates {tmp_path / 'rates.json'} {LINE}"


def test_the_best_pipelines_are_tried_with_a_shared_vocabulary(line, capsys, tmp_path):
    """7B at pp 4: zb-v with it takes 8.08 s, 1F1B 8.68, and the search said that nothing beats 1F1B."""
    with_it, said = run_search(f"{line} {DEEP}", capsys, tmp_path)
    without, _ = run_search(f"{line} vocabulary {DEEP}", capsys, tmp_path)
    assert not any(FLAG in x["flags"] for x in without)
    assert with_it[0]["step_s"] < 0.99 * without[0]["step_s"]
    assert FLAG in with_it[0]["flags"]
    assert "vocabulary on all pipeline ranks" in said.out
    assert FLAG not in said.out.partition("not searched: ")[2]
    # A run with these flags has this plan.
    out = tmp_path / "one.json"
    words = f"{MODEL} {line}".split(" --without")[0].split()
    main([*words, "--num-layers", "8", *with_it[0]["flags"], "--json", str(out)])
    made = json.loads(out.read_text())
    assert (made["plan"], made["step"]["predicted"]["seconds"]) == (with_it[0]["plan"], with_it[0]["step_s"])


def test_a_small_head_takes_no_table_of_a_shared_vocabulary(line, capsys, tmp_path):
    found, _ = run_search(line.replace("8000", "60").replace("8192", "64") + f" {DEEP}", capsys, tmp_path)
    assert not any(FLAG in x["flags"] for x in found)


def test_the_users_own_shared_vocabulary_stays_in_pipelines(line, capsys, tmp_path):
    """Each of 13 plans had --unset vocab-parallel-pipeline, and all of them were slower than the user's."""
    found, _ = run_search(f"{line} {DEEP} {FLAG}", capsys, tmp_path)
    assert all(FLAG in x["flags"] and not x["leave_out"] for x in found)


def test_only_plans_with_a_shared_vocabulary_take_post_validation_back(line, capsys, tmp_path):
    """A run refuses both, so that a zb-h2 user's shared plans, and no others, wait at the end of a step."""
    found, said = run_search(f"{line} {DEEP} --enable-optimizer-post-validation", capsys, tmp_path)
    shared = [FLAG in x["flags"] for x in found]
    assert {*shared} == {True, False}
    assert [x["leave_out"] for x in found] == [["--enable-optimizer-post-validation"] * one for one in shared]
    assert said.out.count(", without a barrier; plan") == shared.count(False) + len(["yours"])


@pytest.mark.parametrize("own", [False, True])
def test_a_shared_vocabulary_has_to_gain_a_percent(own):
    line = "--global-batch-size 16 --padded-vocab-size 1024 --pipeline-model-parallel-size 2"
    plain, shared = (
        of_run(replace(parse(Config, [*MODEL.split(), *line.split(), *more]), world_size=2), SLOW)
        for more in ([], [FLAG])
    )
    for ratio, stays in ((0.98, {"shared", *["plain"] * (not own)}), (0.995, {"shared"} if own else {"plain"})):
        one = replace(shared, step=ratio * plain.step)
        left = [*worth_it([plain, one, None], 1e12, own=own)]
        assert {name for name, x in (("plain", plain), ("shared", one)) if x in left} == stays
    # The only one with room stays.
    assert shared in [*worth_it([replace(plain, peak=2e12), replace(shared, step=9.0), shared], 1e12, own=own)]
