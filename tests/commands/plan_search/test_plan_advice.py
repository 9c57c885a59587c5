"""The advice at the end of a page, and the plans that keep the user's own pp and schedule."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import pytest
from small_searches import MODEL, SLOW, found_by, page_of, run_search

from megapipe.commands.plan.main import main
from megapipe.commands.plan.one_change import change_lines, one_change, surest
from megapipe.commands.plan.pasted import changed
from megapipe.commands.plan.search.final import of_run
from megapipe.commands.plan.search.like_yours import like_yours, narrowed
from megapipe.commands.plan.search.listed.asked import ANYTHING, SearchRestrictions, asked_of
from megapipe.commands.plan.search.listing import best_of
from megapipe.commands.plan.search.report import UserPlan
from megapipe.commands.plan.search.taken import Advice, names_layout, to_take
from megapipe.commands.plan.verdict import Machine
from megapipe.config import Config, ParallelConfig
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.plan import GIB

RATES = {"flops": 1e11, "inside": 1e9, "outside": 1e8, "overhead": 1e-5, "node": 2}
MINE = (
    "--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
    "--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)


def configured(flags: str) -> Config:
    return parse(Config, [*MODEL.split(), *flags.split()])


def test_the_best_plan_of_your_own_pp_and_schedule_is_on_the_page(capsys, tmp_path):
    """Mixtral under Megatron's interleaving was sent to ZB-V at pp 2, for 3% over its own pp 4 and schedule."""
    (tmp_path / "rates.json").write_text(json.dumps(RATES))
    line = f"--global-batch-size 16 --world-size 4 --rates {tmp_path / 'rates.json'} {MINE}"
    best, said = run_search(line, capsys, tmp_path)
    (mine,) = (x for x in best if x["why"] == "your pp and schedule")
    assert mine["schedule"] == "interleaved"
    assert "--pipeline-model-parallel-size 2" in " ".join(mine["flags"])
    assert ". your pp and schedule: " in said.out
    # The fastest of all interleaved plans with two stages on each of two ranks.
    axes = {"pp": "2", "schedule": "interleaved", "sharding": "no"}
    found = found_by("--num-layers 8 --global-batch-size 16", 4, 72 * GIB, SLOW, "moves", **axes)
    hidden = {x.step for x in found.finished if x.config.overlaps_tp or x.schedule != "interleaved"}
    assert mine["step_s"] <= 1.05 * min(x.step for x in found.finished if x.step not in hidden)


def test_an_interrupt_of_the_second_search_leaves_the_page_of_the_first(monkeypatch, capsys, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("megapipe.commands.plan.searched.like_yours", interrupted)
    best, said = run_search("--global-batch-size 8 --world-size 2 --pipeline-model-parallel-size 2", capsys, tmp_path)
    assert best
    assert all(x["why"] != "your pp and schedule" for x in best)
    assert "next: megapipe check" in said.out


def test_a_second_search_keeps_pp_schedule_stages_and_sharding():
    own = configured(MINE)
    narrow = narrowed(ANYTHING, own)
    assert narrow is not None
    assert narrow.among == {axis: {x} for axis, x in (("pp", "2"), ("schedule", "interleaved"), ("sharding", "no"))}
    assert narrow.without == {"moves", "hiding"}
    assert narrow.schedules([("interleaved", 2), ("interleaved", 4), ("zb-v", None)]) == [("interleaved", 2)]
    # A user whose own plan hides messages may have others that do.
    assert narrowed(ANYTHING, own, hides=True).without == {"moves"}
    # Without a pipeline there is no schedule to keep.
    assert narrowed(ANYTHING, configured("")) is None
    assert narrowed(SearchRestrictions(narrow.among), own) is None
    for fix, among, without in (
        ((), ("pp=4",), ()),
        ((), (), ("interleaved",)),
        ((), ("schedule=zb-v",), ()),
        ((), (), ("pipeline",)),
    ):
        assert narrowed(asked_of(fix, among, without, own), own) is None
    # A search of minutes ended with the error of these stages, and without a page.
    uneven = "--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3"
    assert narrowed(ANYTHING, configured(f"{uneven} --pipeline-schedule interleaved")) is None


def test_a_plan_of_your_pp_and_schedule_is_listed_if_it_is_faster_than_yours():
    own = configured("--global-batch-size 4 --pipeline-model-parallel-size 2")
    found = found_by("--global-batch-size 4", 2, pp="2", schedule="1f1b")
    first = best_of(found)[0].plan
    close, slow = (replace(first, step=ratio * first.step) for ratio in (1.04, 1.06))
    assert like_yours(found, own, close, Machine(GIB), SLOW) is None
    for yours in (slow, None):
        assert like_yours(found, own, yours, Machine(GIB), SLOW) == first


def test_a_plan_that_both_searches_have_made_is_listed_once():
    """Plans 6 and 7 of a page were one zb-v at pp 2: "your pp and schedule" and a plain pipeline."""
    found = found_by("--global-batch-size 4", 2)
    plans = [x.plan for x in best_of(found)]
    found.like_yours = replace(plans[-1])
    listed = best_of(found)
    assert [x.plan for x in listed] == plans
    assert listed[-1].why == "your pp and schedule"


@pytest.mark.parametrize("field", ["changed", "like_yours"])
def test_no_plan_of_a_search_is_called_the_fastest_next_to_a_faster_one_near_yours(field):
    """Plan 1 of a page was "your flags, one changed" of 7.27 ms, and plan 2 of 7.90 ms was "fastest"."""
    found = found_by("--global-batch-size 4", 2)
    first = best_of(found)[0].plan
    setattr(found, field, replace(first, step=0.8 * first.step))
    assert [x.why for x in best_of(found)].index("fastest") == 0
    setattr(found, field, replace(first, step=1.2 * first.step))
    said = [(x.why, x.plan.step) for x in best_of(found)]
    assert said[0] == ("fastest", first.step)
    assert any(why.startswith("your ") for why, _ in said)


def test_a_plan_of_your_flags_with_one_changed_is_listed_and_may_be_taken(capsys, tmp_path):
    """A page took nine changed flags, and named one that its own rules preferred a line above."""
    line = (
        "--global-batch-size 8 --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform"
    )
    # A stopped search makes no second one with the user's own pp and schedule.
    best, said = run_search(f"{line} --world-size 4 --search-seconds 1", capsys, tmp_path)
    (change,) = (x for x in best if x["why"] == "your flags, one changed")
    assert f": {change['step_s']:.4g} s, " in said.out.partition("one change alone: ")[2].partition("\n")[0]
    own = configured(line)
    assert len(changed(own, parse(Config, [*MODEL.split(), *line.split(), *change["flags"]]))) == 1


@pytest.mark.parametrize("hides", ["", "--tp-comm-overlap"])
def test_who_hides_messages_is_given_a_changed_plan_that_hides_them_too(hides):
    flags = "--global-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full"
    flags += f" --recompute-method uniform --padded-vocab-size 1024 {hides}"
    mine = of_run(replace(configured(flags).with_batch(8), world_size=2), SLOW)
    plan = surest(mine, one_change(mine, SLOW, Machine(GIB)), Machine(GIB), ANYTHING)
    assert plan is not None
    assert plan.step < 0.9 * mine.step
    assert plan.config.overlaps_tp == bool(hides)


@pytest.mark.parametrize("pp", [1, 2])
def test_your_flags_with_one_changed_are_of_a_search_without_pipelines_if_they_have_none(pp):
    """A search --without pipeline listed no plan with one flag changed, whatever the user's flags."""
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    line = f"--global-batch-size 8 --pipeline-model-parallel-size {pp} --padded-vocab-size 1024 {full}"
    mine = of_run(replace(configured(line).with_batch(8), world_size=2), SLOW)
    changes = one_change(mine, SLOW, Machine(GIB))
    assert surest(mine, changes, Machine(GIB), ANYTHING) is not None
    found = surest(mine, changes, Machine(GIB), SearchRestrictions(without=frozenset(["pipeline"])))
    assert (found is None) == (pp > 1)


def test_stages_by_their_layers_and_by_their_number_are_one_flag():
    own = configured(MINE)
    same = own.with_fields(
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=2,
        pipeline_schedule="interleaved",
    )
    assert changed(own, same) == []
    # The one that the user gave.
    other = same.with_fields(num_virtual_stages_per_pipeline_rank=4)
    assert changed(own, other) == ["--num-layers-per-virtual-pipeline-stage"]


def test_each_plan_says_why_it_is_listed(capsys, tmp_path):
    best, said = run_search("--global-batch-size 8 --world-size 4", capsys, tmp_path)
    assert best[0]["why"] == "fastest"
    for n, x in enumerate(best, 1):
        assert f"{n:2}. {x['why']}: {x['step_s']:.4g} s" in said.out
        assert 1 <= len(x["why"].split()) <= 6


def test_the_advice_is_the_last_of_the_page_and_reads_at_once(capsys, tmp_path):
    """The line stood above a table and below six paragraphs, without the schedule or the seconds of its plan."""
    line = "--global-batch-size 8 --world-size 4 --pipeline-model-parallel-size 4 --why take yours"
    best, said = run_search(line, capsys, tmp_path)
    numbers = json.loads((tmp_path / "plans.json").read_text())
    page = said.out.splitlines()
    (start,) = (n for n, text in enumerate(page) if text.startswith("take "))
    assert start > page.index(next(text for text in page if text.startswith("seconds of a step")))
    assert page[-2].startswith("next: megapipe check with ")
    assert all(text.startswith("  ") for text in (*page[start + 1 : -2], page[-1]))
    assert max(map(len, page[start:])) <= 100
    number = numbers["take"]
    x = numbers["yours"] if number == "yours" else best[number - 1]
    assert re.match(rf"take {number}: {x['schedule']}, .*pp \d.*, {x['step_s']:.4g} s, .* GiB to spare$", page[start])
    assert f"shows plan {x['plan']} again" in page[-2]
    # The table compares the plan to take with the user's own.
    total = next(text.split() for text in page if text.startswith("all  "))
    assert total[1:3] == [f"{x['step_s']:.4f}", f"{numbers['yours']['step_s']:.4f}"]


def test_a_wrong_word_of_why_is_refused_before_the_search():
    with pytest.raises(ConfigError, match="--why best: give a number of the list, yours or take"):
        main([*MODEL.split(), "--search", "--global-batch-size", "4", "--world-size", "2", "--why", "best", "1"])


def test_why_yours_says_why_there_is_no_plan_of_yours(capsys):
    """A page with refused flags ended with "--why yours is no plan of the list: it has 1 to 14."."""
    line = "--search --search-jobs 1 --global-batch-size 4 --world-size 2 --among tp=1 micro=1 --without zb-auto"
    refused = "--pipeline-model-parallel-size 3", "a run refuses them"
    for flags, reason in (refused, ("--unset micro-batch-size", "they name no layout")):
        words = f"{MODEL} {line} {flags} --why take yours".split()
        with pytest.raises(ConfigError, match=f"--why yours: your flags have no plan, as {reason}."):
            main(words)
        said = capsys.readouterr().out
        assert "take 1: " in said
        # Who has named no layout has nothing that a plan could change.
        assert ("flags that differ from yours: " in said) == ((flags, reason) == refused)


def test_a_limit_on_memory_of_yours_alone_is_said(capsys, tmp_path):
    """Plans of 60 GiB had --unset memory-limit-gib for a user who had asked for 1 GiB, without a word."""
    line = "--global-batch-size 4 --world-size 1 --memory-limit-gib 1"
    said = run_search(line, capsys, tmp_path)[1].out
    assert "--memory-limit-gib 1 limits your own plan alone: --reserved-gib 79 limits all others to as much" in said
    assert "limits your own plan" not in run_search(f"{line} --reserved-gib 79", capsys, tmp_path)[1].out


def test_a_plan_that_is_as_fast_as_yours_is_no_advice():
    """A user of 1F1B was sent to ZB-H1 for 1.1%, as a third plan was 5.6% faster than 1F1B."""
    own = configured("--global-batch-size 4 --pipeline-model-parallel-size 2 --pipeline-schedule 1f1b")
    found = found_by("--global-batch-size 4", 2, pp="2", schedule="1f1b")
    first = min(found.best.values(), key=lambda x: x.step)

    def plan(percent: float, schedule: str):
        config = replace(own.with_fields(pipeline_schedule=schedule), world_size=4)
        return replace(first, step=(1 + percent / 100) * first.step, config=config)

    yours = plan(5.6, "1f1b")
    many = replace(plan(0, "zb-v"), config=plan(0, "zb-v").config.with_fields(vocab_parallel_pipeline=True))
    advice = to_take([many, plan(4.4, "zb-h1")], own, yours, Machine(GIB))
    assert advice.number == 1
    take, differ, gain, *rules = advice.lines(Machine(GIB), SLOW)
    assert take.endswith(" GiB to spare")
    assert differ == "  flags that differ from yours: 2 (--pipeline-schedule, --vocab-parallel-pipeline)"
    assert gain == f"  yours takes {yours.step:.4g} s, 1.06 times as long"
    assert rules[:2] == ["  within 5% of the fastest: 1, 2", "  faster than yours by 5% or more: 1"]
    # Without room for yours there is nothing to keep.
    full = replace(yours, peak=2 * GIB)
    assert to_take([many, plan(4.4, "zb-h1")], own, full, Machine(GIB)).number == 2


def test_lines_of_the_advice_fit_a_terminal_and_keep_the_names_of_flags_whole():
    """One line had 241 columns, as it named six flags. A terminal broke it within them."""
    (plan,) = found_by("--global-batch-size 4", 1, pp="1", schedule="1f1b", micro="1").best.values()
    flags = tuple(f"--{field.name.replace('_', '-')}" for field in fields(ParallelConfig)[:9])
    lines = Advice(1, plan, flags, (), ("word " * 40,)).lines(Machine(GIB), SLOW)
    assert max(map(len, lines)) <= 100
    words = " ".join(lines).split()
    assert [word.strip("(),") for word in words if "--" in word] == [*flags]
    assert words.count("word") == 40


def test_the_advice_names_the_layout_and_what_the_plan_needs():
    (plan,) = found_by("--global-batch-size 4", 2, tp="2", schedule="1f1b", micro="1", recompute="full").best.values()
    config = plan.config.with_fields(use_megatron_fsdp=True, vocab_parallel_pipeline=True)
    for one, needs in (
        (plan, "recomputes full"),
        (
            replace(plan, config=replace(config, world_size=2)),
            "sharded weights, weights that are all gathered at once, recomputes full, vocabulary on all pipeline ranks",
        ),
    ):
        words = " ".join(Advice(1, one, None, ()).lines(Machine(GIB), SLOW)).split()
        assert " ".join(words).startswith(f"take 1: 1f1b, tp 2, pp 1, {needs}, {one.step:.4g} s, ")


def test_your_own_plan_to_take_is_launched_with_your_flags_as_they_are():
    (plan,) = found_by("--global-batch-size 4", 1, pp="1", schedule="1f1b", micro="1").best.values()
    for number, flags in (("yours", "your flags as they are"), (2, "the flags of this plan after yours")):
        *_, then, _ = Advice(number, plan, None, ()).lines(Machine(GIB), SLOW)
        assert then.startswith(f"next: megapipe check with {flags} shows plan ")


def test_the_gain_over_a_plan_whose_experts_cross_nodes_has_the_published_range():
    """The two pairs were predicted 1.90 and 3.42 times as long, and took 1.35 and 1.69."""
    found = found_by("--global-batch-size 4", 1)
    plan = next(iter(found.best.values()))
    config = plan.config.with_fields(num_experts=8, expert_model_parallel_size=4)
    mine = replace(plan, step=3 * plan.step, config=replace(config, world_size=4))
    low, high = sorted(3 * measured / told for measured, told in ((1.35, 1.90), (1.69, 3.42)))
    for node, known in ((2, f"; by the two published pairs {low:.1f} to {high:.1f} times as long"), (4, "")):
        _, gain, *_ = Advice(1, plan, None, (), yours=mine).lines(Machine(GIB), replace(SLOW, node=node))
        assert gain == f"  yours takes {mine.step:.4g} s, 3 times as long{known}"


def test_memory_decides_before_flags_where_no_layout_is_named():
    """A student who had typed no schedule was sent to a slower and tighter plan, as it changed fewest flags."""
    own = configured("--global-batch-size 4 --use-distributed-optimizer")
    found = found_by("--global-batch-size 4", 2, pp="2", schedule="1f1b")
    first = min(found.best.values(), key=lambda x: x.step)

    def plan(peak: float, **changes):
        return replace(first, peak=peak, config=replace(own.with_fields(**changes), world_size=4))

    tight = plan(9.0, micro_batch_size=1)
    roomy = plan(5.0, pipeline_model_parallel_size=2, pipeline_schedule="zb-v")
    advice = to_take([tight, roomy], own, None, Machine(GIB))
    assert advice.number == 2
    assert advice.rules[-1] == "it needs least memory, as you have named no layout that it could keep"
    named = own.with_fields(tensor_model_parallel_size=2)
    assert [names_layout(x) for x in (own, named, configured(MINE))] == [False, True, True]
    tight = replace(tight, config=replace(named, world_size=4))
    assert to_take([tight, roomy], named, None, Machine(GIB)).number == 1


def test_plans_as_fast_as_the_plainest_one_are_compared_by_the_flags_that_they_change():
    """Plain plans 3% apart were not compared, as only one was within 5% of a plan with sharded weights."""
    own = configured("--global-batch-size 4 --pipeline-model-parallel-size 2")
    found = found_by("--global-batch-size 4", 2, pp="2", schedule="1f1b")
    first = min(found.best.values(), key=lambda x: x.step)

    def plan(percent: int, **changes):
        config = replace(own.with_fields(**{"pipeline_schedule": "1f1b"} | changes), world_size=4)
        return replace(first, step=(1 + percent / 100) * first.step, config=config)

    shards = {"use_megatron_fsdp": True}
    many = {"pipeline_schedule": "zb-v", "recompute_granularity": "full"}
    best = [plan(0, **shards), plan(3, **many), plan(7, micro_batch_size=2), plan(9)]
    advice = to_take(best, own, None, Machine(GIB))
    assert advice.number == 3
    assert "as plain as 2, within 5% of it: 3" in advice.rules
    assert to_take([*best[:2], best[3]], own, None, Machine(GIB)).number == 2

    # Your pp and schedule are named where they are as fast as the plan to take, though not as the fastest.
    own = own.with_fields(pipeline_schedule="1f1b")
    best = [plan(0, **many), plan(4, pipeline_schedule="zb-v"), plan(8)]
    advice = to_take(best, own, None, Machine(GIB))
    assert advice.number == 2
    keeps = "plan 3 keeps your pp and schedule and takes 3.8% more, which predictions cannot tell from none"
    assert keeps in advice.caveats
    assert not any("keeps" in x for x in to_take([*best[:2], plan(10)], own, None, Machine(GIB)).caveats)
    full = replace(best[2], peak=2 * GIB)
    assert not any("keeps" in x for x in to_take([*best[:2], full], own, None, Machine(GIB)).caveats)


def test_how_much_slower_yours_is_has_a_range_where_its_experts_cross_nodes():
    """170% slower was predicted from two messages that took 0.71 and 0.49 of what such predictions say."""
    found = found_by("--global-batch-size 4", 1)
    mine = next(iter(found.best.values()))
    config = mine.config.with_fields(num_experts=8, expert_model_parallel_size=4)
    yours = UserPlan(replace(mine, step=2.7 * mine.step, config=replace(config, world_size=4)))
    shown = {node: page_of(found, Machine(GIB), replace(SLOW, node=node), yours) for node in (2, 4)}
    low, high = sorted(2.7 * measured / told for measured, told in ((1.35, 1.90), (1.69, 3.42)))
    text = f"170.0% slower than the first, .*; by the two published pairs {low:.1f} to {high:.1f} times as long, so"
    assert re.search(text, shown[2])
    assert (f"{low:.1f}", f"{high:.1f}") == ("1.3", "1.9")
    assert "published pairs" not in shown[4]


def test_a_change_that_takes_experts_into_a_node_has_the_range_too():
    flags = "--num-experts 4 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall"
    flags += " --moe-ffn-hidden-size 16 --padded-vocab-size 1024"
    config = replace(configured(f"--global-batch-size 8 {flags}").with_batch(8), world_size=4)
    mine = of_run(config, SLOW)
    changes = change_lines(mine, one_change(mine, SLOW, Machine(GIB)), SLOW, Machine(GIB))
    (line,) = (line for line in changes[:-1] if "--expert-model-parallel-size 2" in line)
    assert re.search(r"--expert-model-parallel-size 2: [0-9.]+ s, -\d", line)
    assert not any("published" in line for line in changes[:-1])
    assert re.match(r"by the two published pairs yours takes [0-9.]+ to [0-9.]+ times as long as with --", changes[-1])


def test_a_page_of_full_devices_says_how_to_ask_for_leaner_plans():
    """All plans filled the device, and nothing said how little sharded weights could need."""
    found = found_by("--global-batch-size 4", 1)
    least = min(x.plan.peak for x in best_of(found))
    machine = Machine(1.8 * least, reserved=0.0)
    said = page_of(found, machine)
    half = 0.9 * least / GIB
    assert f"--reserved-gib {half:.3g} asks for plans of at most {half:.3g}" in said
    assert "asks for plans of at most" not in page_of(found, Machine(2.2 * least))


def test_what_is_the_same_on_each_page_is_one_block_of_few_lines():
    for experts in ("", "--num-experts 4"):
        found = found_by(f"--global-batch-size 4 {experts}", 1, pp="1")
        _, block = page_of(found, Machine(GIB)).split("what these numbers mean, on every page:\n")
        lines = block.splitlines()
        assert len(lines) == 6
        assert [line for line in lines if len(line) > 100] == []
        for fact in ("reserved: 10%", "--no-save-optim", "12% on average, 43% at most", "no GPU", "not searched: "):
            assert fact in block
        assert ("41% and 103%" in block) == bool(experts)
