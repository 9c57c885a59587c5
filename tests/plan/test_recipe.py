"""A run and `schedules show` make the same table of the same recipe, whatever features are put together."""

import json

import pytest

from megapipe.commands import schedules
from megapipe.errors import ConfigError, ScheduleError
from megapipe.plan import make_plan, with_batch
from megapipe.schedule import SCHEDULES, Costs, build, simulate, unpaired
from megapipe.schedule.costs_file import dump_costs
from megapipe.schedule.dependencies import share_of_window
from megapipe.schedule.families.offload.asked import Offload
from megapipe.schedule.families.sharding.asked import Sharding
from megapipe.schedule.families.step.asked import StepPasses
from megapipe.schedule.ingredients import Pairing
from megapipe.schedule.recipe import Recipe
from megapipe.schedule.recipe_line import to_line
from tools.proofs.tables.digests import FEATURES, MODELS, planned
from tools.proofs.tables.recipes import different

PLAIN = "--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size"
EXPERTS = f"{MODELS['experts']} --expert-model-parallel-size 2"
CIRCLE = (
    f"8 --pipeline-schedule v-half --pipeline-model-parallel-size 4 --num-layers 8 --global-batch-size 16 {EXPERTS} "
    f"{FEATURES['pairs'][0]} {FEATURES['recompute'][1]}"
)
"""A run for which no table keeps as many microbatches as its costs count."""

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
    "counts of recomputed microbatches that go in a circle": CIRCLE,
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


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-v"])
def test_a_plan_of_pairs_prices_the_microbatches_that_the_run_recomputes(name):
    """It counted those of the table without pairs: 1F1B with longer warm-ups recomputes more, GPipe fewer."""
    pairs = f"4 --pipeline-schedule {name} {PLAIN} 16 {EXPERTS} {FEATURES['pairs'][0]}"
    full = f"{pairs} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    _, plan = planned(f"{full} --num-microbatches-with-partial-activation-checkpoints 1")
    never, always = planned(pairs)[1].costs, planned(full)[1].costs
    place = plan.schedule.placement
    kept = share_of_window(plan.schedule, 1)  # as the engine asks
    for stage in range(place.chain):
        fraction = sum(len(kept[twin]) for twin in place.replicas(stage)) / plan.schedule.num_microbatches
        assert 0 < fraction <= 1
        assert plan.costs.b[stage] == pytest.approx(always.b[stage] + fraction * (never.b[stage] - always.b[stage]))
        assert plan.costs.mem_b[stage] == pytest.approx(
            always.mem_b[stage] + fraction * (never.mem_b[stage] - always.mem_b[stage])
        )


def test_counts_that_go_in_a_circle_price_no_fewer_activations_than_the_run_keeps():
    _, plan = planned(CIRCLE)
    assert plan.pieces.kept is not None
    kept = share_of_window(plan.schedule, 1)  # as the engine asks
    more = [
        fraction * plan.schedule.num_microbatches - len(own)
        for fraction, own in zip(plan.pieces.kept[1], kept, strict=True)
    ]
    assert more == [0, 0, 0, 0, 0, 0, 1, 0]


def test_pairs_and_a_split_by_cost_are_chosen_by_one_clock():
    # was refused: the split by another clock left no pair that gains anything
    line = (
        f"16 --pipeline-schedule 1f1b --pipeline-model-parallel-size 8 --num-layers 16 --global-batch-size 16 {EXPERTS}"
    )
    _, plan = planned(f"{line} {FEATURES['pairs'][0]} {FEATURES['layout'][0]}")
    _, even = planned(f"{line} {FEATURES['pairs'][0]}")
    assert plan.recipe is not None
    times = [simulate(one.schedule, plan.recipe.linked(one.costs)).makespan for one in (plan, even)]
    assert times[0] <= times[1]


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
        "interleaved --pp 4 --microbatches 8 --chunks 2 --option microbatch_group_size_per_vp_stage=4 "
        "--pairs 0.2 --split-backwards --depths 3,0 --copies fits --copied-chunks 1 --shard-gradients "
        "--step reduce,validate"
    )


@pytest.mark.parametrize("name", [name for name, entry in SCHEDULES.items() if not entry.searched])
def test_a_recipe_has_no_option_that_changes_nothing(name):
    """A run of 1F1B on one tensor-parallel rank had --as-published --no-pairs, and neither has a say there."""
    line = to_line(Recipe(name, 4, 8, pairs=False))
    table = build(name, 4, 8)
    moved = [build(name, 4, 8, costs=Costs(*times)) != table for times in ((3, 1, 3), (1, 3, 2), (2, 5, 3))]
    assert ("--as-published" in line) == any(moved)
    assert ("--no-pairs" in line) == any(len(step) > 1 for step in table.steps())


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_costs_of_a_plan_with_depths_order_the_stages_before_them(name, tmp_path, capsys):
    """The line of a recipe without --as-published was refused: f names 3 stages, but the model is cut in 2."""
    config, plan = planned(f"2 --pipeline-schedule {name} {PLAIN} 8 --mtp-num-layers 1")
    assert different(config, plan) is None
    file = tmp_path / "costs.json"
    file.write_text(dump_costs(plan.costs))
    schedules.main(["show", name, *f"--pp 2 --microbatches 8 --depths 1 --costs {file}".split()])
    assert "makespan" in capsys.readouterr().out


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
