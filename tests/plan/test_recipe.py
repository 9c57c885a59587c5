"""A run and `schedules show` make the same table of the same recipe, whatever features are put together."""

import json

import pytest

from megapipe.commands import schedules
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan import make_plan, with_batch
from megapipe.schedule import unpaired
from megapipe.schedule.families.offload.asked import Offload
from megapipe.schedule.families.sharding.asked import Sharding
from megapipe.schedule.families.step.asked import StepPasses
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.recipe_line import to_line
from megapipe.schedule.shapes.pairs.asked import Pairing
from tools.proofs.tables.digests import FEATURES, MODELS, planned
from tools.proofs.tables.recipes import different

PLAIN = "--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size"
EXPERTS = f"{MODELS['experts']} --expert-model-parallel-size 2"
RUNS = {
    "shards of gradients and gathers": (
        f"4 --pipeline-schedule zb-h1 {PLAIN} 16 {FEATURES['gather'][0]} {FEATURES['sharding'][1]}"
    ),
    "slices and shards": f"4 --pipeline-schedule zb-h1 {PLAIN} 16 --pipeline-slices 2 {FEATURES['sharding'][2]}",
    "slices and copies": f"2 --pipeline-schedule 1f1b {PLAIN} 8 --pipeline-slices 2 {FEATURES['copies'][0]}",
    "depths and vocabulary": f"2 --pipeline-schedule zb-v {PLAIN} 8 --mtp-num-layers 1 --vocab-parallel-pipeline",
    "depths and pairs": f"4 --pipeline-schedule zb-v {PLAIN} 16 {EXPERTS} --mtp-num-layers 1 {FEATURES['pairs'][0]}",
    "vocabulary and copies": f"2 --pipeline-schedule zb-h1 {PLAIN} 8 --vocab-parallel-pipeline {FEATURES['copies'][0]}",
    "copies and shards": f"4 --pipeline-schedule gpipe {PLAIN} 16 {FEATURES['copies'][0]} {FEATURES['sharding'][2]}",
    "pairs and a split by cost": (
        f"4 --pipeline-schedule zb-v {PLAIN} 16 --num-layers 7 {EXPERTS} {FEATURES['pairs'][0]} "
        "--pipeline-model-parallel-layout auto"
    ),
    "pairs and some microbatches that compute nothing again": (
        f"4 --pipeline-schedule zb-v {PLAIN} 16 {EXPERTS} {FEATURES['pairs'][0]} --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --num-microbatches-with-partial-activation-checkpoints 1"
    ),
    "slices of few microbatches": f"2 --pipeline-schedule dualpipe-v {PLAIN} 2 --pipeline-slices 4",
    "gathers and validation": (
        f"4 --pipeline-schedule zb-h1 {PLAIN} 16 {FEATURES['gather'][0]} {FEATURES['validation'][0]}"
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_show_draws_the_table_of_a_run_from_its_recipe(name):
    config, plan = planned(RUNS[name])
    assert different(config, plan) is None
    smaller = config.with_batch((config.global_batch_size or 0) // 2)
    assert different(smaller, with_batch(plan, smaller)) is None, "a batch that grows begins with another table"


def test_a_batch_that_begins_too_small_for_pairs_runs_without_them():
    # found by the covering array: the launch was refused, and its check was not
    config, plan = planned(f"4 --pipeline-schedule zb-h1 {PLAIN} 32 {EXPERTS} {FEATURES['pairs'][0]}")
    small = config.with_batch(8)
    with pytest.raises(ConfigError, match="no two passes run together make zb-h1 with 4 microbatches shorter"):
        make_plan(small)
    assert unpaired(plan.schedule) != plan.schedule
    begun = with_batch(plan, small).schedule
    assert unpaired(begun) == begun


def test_a_recipe_is_a_line_that_show_takes():
    recipe = Recipe(
        "interleaved",
        4,
        8,
        chunks=2,
        options=(("microbatch_group_size_per_vp_stage", 4),),
        pairs=Pairing(split=True, share=0.2),
        depths=(3, 0),
        offload=Offload("fits", chunks=1),
        sharding=Sharding(weights=False),
        step=StepPasses(reduce=True, validate=True),
    )
    assert to_line(recipe) == (
        "interleaved --pp 4 --microbatches 8 --chunks 2 --option microbatch_group_size_per_vp_stage=4 --as-published "
        "--pairs 0.2 --split-backwards --depths 3,0 --copies fits --copied-chunks 1 --shard-gradients "
        "--step reduce,validate"
    )


def test_a_file_says_the_recipe_that_made_it(tmp_path, capsys):
    """What `show --json` wrote is drawn again from its own recipe and costs, with the same makespan."""
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    flags = "1f1b --pp 4 --microbatches 8 --costs 3,2,1 --vocabulary 0.5,0.25 --copy-ratio 0.5"
    schedules.main(["show", *flags.split(), "--json", str(first)])
    written = json.loads(first.read_text())
    schedules.main(["show", *written["recipe"].split(), "--costs", str(first), "--json", str(again)])
    assert json.loads(again.read_text())["makespan"] == written["makespan"]


def test_each_two_parts_that_exclude_each_other_are_named_at_once():
    recipe = Recipe("1f1b", 2, 4, cuts=(1, 1), pairs=Pairing(), depths=(1,), vocabulary=True)
    assert list(recipe.problems({"cuts": "--slices", "pairs": "--pairs"})) == [
        "--slices cuts a table of F, B and W: leave out --pairs.",
        "--slices cuts a table of F, B and W: leave out vocabulary.",
        "--slices cuts a table of F, B and W: leave out depths.",
        "--pairs are made in a table of F, B and W, not with vocabulary. Leave one of them out.",
    ]


def test_an_option_that_the_order_does_not_have_is_refused():
    with pytest.raises(ScheduleError, match="takes no option groups"):
        schedules.main(["show", "1f1b", "--pp", "2", "--microbatches", "4", "--option", "groups=2"])
