"""A search that ends before all plans are judged, and the plan to take."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace

import pytest
from nightly import by_night
from small_searches import MODEL, SLOW, found_by, page_of

from megapipe.checks.run import flag_problems
from megapipe.checks.vocabulary import with_vocabulary
from megapipe.commands.plan.pasted import changed, flags_of, left_out, pasted
from megapipe.commands.plan.search.compared import plain_instead
from megapipe.commands.plan.search.final import of_run
from megapipe.commands.plan.search.hiding import hides_unmeasured
from megapipe.commands.plan.search.judged.found import SearchResults
from megapipe.commands.plan.search.judged.judging import Judging
from megapipe.commands.plan.search.judged.screen import CandidatePlan
from megapipe.commands.plan.search.listed.asked import SearchRestrictions, asked_of, joined
from megapipe.commands.plan.search.listing import best_of
from megapipe.commands.plan.search.search import search
from megapipe.commands.plan.search.taken import choices, demands, to_take
from megapipe.commands.plan.searched import SearchFlags, searched
from megapipe.commands.plan.verdict import Machine, load_line, of_busy_experts
from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.plan import GIB
from megapipe.schedule import SCHEDULES

ONE_TABLE = SearchRestrictions({"pp": frozenset("2"), "schedule": frozenset(["1f1b"])})


def taken(*given):
    """The number of the plan to take, and all that is said of it."""
    advice = to_take(*given)
    return advice.number, "\n".join([*advice.rules, *advice.caveats])


def test_a_second_interrupt_ends_the_search_with_the_plan_that_it_has():
    """The program `timeout` sends two at once, and nothing was printed after three minutes."""
    config = parse(Config, [*MODEL.split(), "--global-batch-size", "8"])

    def interrupted(done, among, best, *last):
        if best is not None and (done or not last):
            raise KeyboardInterrupt

    found = search(config, 4, Machine(GIB), SLOW, 1000, interrupted)
    assert found.stopped
    assert len(found.best) == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_search_ends_when_its_time_is_over_and_says_what_it_has_not_seen(jobs):
    """DeepSeek-V3 on 2,048 devices was listed for minutes and judged for hours."""
    config = parse(Config, [*MODEL.split(), "--global-batch-size", "8"])
    began = time.monotonic()
    found = search(config, 16, Machine(GIB), SLOW, 1000, jobs=jobs, seconds=0.01)
    taken = time.monotonic() - began
    if jobs == 1:
        whole = search(config, 16, Machine(GIB), SLOW, 1000, jobs=jobs, seconds=1e6)
        assert taken < time.monotonic() - began - taken
        assert not whole.stopped
    assert found.stopped
    assert found.best
    first, second, *_ = page_of(found, Machine(GIB)).splitlines()
    assert first.endswith(" when its time was over; these are the best plans until then")
    assert second.startswith("there was no time to list all layouts of more context parallelism than 1: ")


def test_values_of_an_axis_that_is_given_twice_add_up():
    """The second --among replaced the first, and nothing said so."""
    assert asked_of((), ("tp=1", "tp=2..3", "pp=4"), (), Config()).numbers("tp") == [1, 2, 3]
    words = ["--among", "tp=1", "x=2", "--lr", "1", "--fix=pp", "ep", "--among", "pp=3"]
    assert joined(words, ("--among", "--fix")) == ["--lr", "1", "--among", "tp=1", "x=2", "pp=3", "--fix", "pp", "ep"]


def test_a_flag_without_values_is_not_forgotten_when_flags_are_joined():
    """--fix alone was dropped, and all was searched without a word."""
    assert joined(["--fix", "--search"], ("--fix",)) == ["--search", "--fix"]


@pytest.mark.parametrize("seconds", [1, 600])
def test_time_or_an_interrupt_while_slices_are_tried_leaves_the_plans_so_far(monkeypatch, seconds):
    """Slices of 32 devices took 50 seconds of --search-seconds 3, and ctrl-C lost the report."""

    def sliced(*_):
        if seconds == 600:
            raise KeyboardInterrupt
        time.sleep(60)
        raise AssertionError

    monkeypatch.setattr("megapipe.commands.plan.searched.try_slices", sliced)
    words = [*MODEL.split(), "--global-batch-size", "4", "--world-size", "2", "--pipeline-slices", "2"]
    flags = SearchFlags(search=True, search_jobs=1, search_seconds=seconds)
    text, numbers, wrong = searched(parse(Config, words), flags, words)
    assert wrong is None
    assert numbers["plans"]
    assert "these are the best plans until then" in text


def test_of_plans_as_fast_the_one_with_fewest_changes_is_taken_and_then_the_leanest():
    own = parse(Config, [*MODEL.split(), "--global-batch-size", "4", "--pipeline-model-parallel-size", "2"])
    found = search(own, 2, Machine(GIB), SLOW, 1000, asked=ONE_TABLE)
    first = min(found.best.values(), key=lambda x: x.step)

    def plan(percent: int, peak: float, **changes):
        config = replace(own.with_fields(**changes), world_size=4)
        return replace(first, step=(1 + percent / 100) * first.step, peak=peak, config=config)

    far = {"recompute_granularity": "full", "pipeline_schedule": "zb-v"}
    near = {"pipeline_schedule": "zb-h1", "micro_batch_size": 1}
    best = [plan(0, 5.0, **far), plan(1, 3.0, **near), plan(4, 2.0, **near), plan(6, 1.0)]
    machine = Machine(GIB)
    assert taken(best, own, None, machine) == (
        3,
        "within 5% of the fastest: 1, 2, 3\nfewest flags differ from yours, and of several such it needs least memory\n"
        "plan 4 keeps your pp and schedule and takes 1.9% more, which predictions cannot tell from none",
    )
    assert to_take(best[:2], own, None, machine).number == 2
    # Shards change one flag, and much more than a flag.
    shards = own.with_fields(use_megatron_fsdp=True)
    sharded = plan(2, 1.0, use_megatron_fsdp=True, pipeline_schedule="1f1b", micro_batch_size=1)
    assert to_take([*best[:2], sharded], own, None, machine).number == 2
    assert to_take([*best[:2], sharded], shards, None, machine).number == 3
    # Another layout counts too, with a word on how little predictions know of it.
    other = plan(0, 1.0, tensor_model_parallel_size=2)
    number, line = taken([best[0], other], own, None, machine)
    assert number == 2
    assert line.endswith("how far such ratios are off is not known: measure them next to it")
    # The user's own plan has nothing to change, if it has room.
    mine = plan(4, 1.0)
    assert to_take(best, own, mine, machine).number == "yours"
    assert to_take(best, own, mine, Machine(0.5)).number == 3
    # Of those a plan is taken that is faster than the user's own by 5%: 4% are 1.9% for who has 6%.
    assert to_take(best, own, plan(6, 1.0), machine).number == 1
    assert taken([best[0], best[3]], own, None, machine) == (1, "all other plans are slower by 5% or more")
    assert taken(best[:1], own, None, machine) == (1, "")
    assert changed(own, best[0].config) == ["--recompute-granularity", "--pipeline-schedule"]
    assert changed(own, own.with_fields(pipeline_schedule="1f1b")) == []


def test_a_plan_without_room_for_busy_experts_is_not_taken_where_another_is():
    """A page said to take the plan whose experts lack 4.6 GiB at 1.3 times the mean, and the next was 0.1% slower."""
    flags = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 1024"
    own = parse(Config, [*MODEL.split(), "--global-batch-size", "4", *flags.split()])

    def plan(ep: int, **changes):
        config = replace(own.with_fields(expert_model_parallel_size=ep, **changes), world_size=4)
        return of_run(with_vocabulary(config.with_batch(4), 1000), SLOW)

    whole, divided = replace(plan(1, recompute_granularity="full"), step=1.01), replace(plan(2), step=1.0)
    more = of_busy_experts(divided.plan, divided.config)
    assert more > 0
    assert of_busy_experts(whole.plan, whole.config) == 0
    # The second changes a flag more. A hundredth of the device stays free too.
    for spare, number in ((1.01, 1), (0.99, 2)):
        machine = Machine((divided.peak + spare * more) / 0.99)
        best = [divided, replace(whole, peak=divided.peak)]
        number_now, line = taken(best, own, None, machine)
        assert number_now == number
        spare_line = "with 1% of a device to spare, also with an uneven load of their experts: 2"
        assert (spare_line in line) == (number == 2)
    # What busy experts need is said of a plan to take that is not the first, of which the page says it.
    lean = [replace(whole, step=1.0, peak=2 * GIB), replace(divided, step=1.01)]
    load = load_line(divided.plan, divided.config, Machine(GIB).limit)
    for best, said in ((lean, True), ([divided, whole], False)):
        assert (load in to_take(best, own, None, Machine(GIB)).caveats) == said
    # Where no plan has it, the page says so.
    assert "with 1% of a device to spare: none" in taken([whole], own, None, Machine(whole.peak))[1]


def test_a_plain_pipeline_nearly_as_fast_is_on_the_page_and_taken():
    """A dense 7B under 1F1B was sent to DualPipe, with two copies of its weights, and ZB-H1 was not on the page."""
    own = parse(Config, [*MODEL.split(), "--global-batch-size", "8", "--num-layers", "8"])
    asked = SearchRestrictions(among={"pp": frozenset("2"), "tp": frozenset("1")})
    found = search(own, 4, Machine(GIB), SLOW, 1000, asked=asked)
    assert not found.by_schedule
    plain = [x.plan for x in best_of(found) if not demands(x.plan) and not hides_unmeasured(x.plan)]
    assert plain
    assert {x.schedule for x in found.finished} >= {"zb-v", "zb-h1", "interleaved", "1f1b"}

    def plan(percent: int, schedule: str, **changes):
        config = replace(own.with_fields(pipeline_schedule=schedule, **changes), world_size=4)
        return replace(plain[0], step=(1 + percent / 100) * plain[0].step, schedule=schedule, config=config)

    best = [plan(0, "zb-auto"), plan(1, "zb-h1", micro_batch_size=1), plan(2, "dualpipe")]
    number, line = taken(best, own, None, Machine(GIB))
    assert number == 2
    assert "without a searched order, two copies of the weights: 2" in line
    # Who runs DualPipe has the copies already.
    best[2] = replace(best[2], peak=0.0)
    assert to_take(best, own, plan(9, "dualpipe"), Machine(GIB)).number == 3
    assert to_take([best[0], plan(6, "zb-h1")], own, None, Machine(GIB)).number == 1


def test_flags_of_virtual_stages_are_the_interleaved_schedule_to_keep():
    """--fix schedule took 1F1B for a script with --num-layers-per-virtual-pipeline-stage, without a word."""
    flags = "--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
    own = parse(Config, [*MODEL.split(), *flags.split()])
    asked = asked_of(("schedule",), (), (), own)
    assert [name for name in SCHEDULES if asked.allows_schedule(name)] == ["interleaved"]
    assert changed(own, own.with_fields(pipeline_schedule="interleaved")) == []


def test_sharded_weights_that_are_all_whole_at_once_are_not_what_is_asked_for():
    """A search among sharded plans took one stage of 61 GiB, where eight units were as fast and needed 52."""
    own = parse(Config, [*MODEL.split(), "--num-layers", "8", "--global-batch-size", "4"])

    def plan(**changes):
        config = replace(own.with_fields(use_megatron_fsdp=True, **changes), world_size=4)
        return of_run(with_vocabulary(config.with_batch(4), 1000), SLOW)

    units = plan(pipeline_schedule="hanayo", num_virtual_stages_per_pipeline_rank=4)
    whole = replace(plan(), step=units.step)
    assert demands(whole) - demands(units) == {"weights that are all gathered at once"}
    assert to_take([whole, units], own, None, Machine(GIB)).number == 2


def test_a_plan_that_hides_messages_is_taken_by_who_hides_messages_already():
    """A dense 7B was told to take DualPipe-V for 8%, which rests on what no GPU has measured."""
    own = parse(Config, [*MODEL.split(), "--global-batch-size", "4", "--tensor-model-parallel-size", "2"])
    own = own.with_fields(sequence_parallel=True)
    found = search(own, 2, Machine(GIB), SLOW, 1000, asked=ONE_TABLE)
    first = min(found.best.values(), key=lambda x: x.step)

    def plan(percent: int, **changes):
        config = replace(own.with_fields(**changes), world_size=4)
        return replace(first, step=(1 + percent / 100) * first.step, config=config)

    best = [plan(0, tp_comm_overlap=True), plan(8, recompute_granularity="full"), plan(20)]
    assert best[0].config.overlaps_tp
    machine = Machine(GIB)
    number, line = taken(best, own, plan(30), machine)
    assert (number, line.splitlines()[0]) == (2, "all other plans without hidden messages are slower by 5% or more")
    assert "plan 1 is 7.4% faster" in line
    assert line.endswith("so measure it first")
    # The user's own is within 5% of the fastest that hides nothing.
    assert to_take(best, own, plan(10), machine).number == "yours"
    assert to_take(best, own, plan(30, tp_comm_overlap=True), machine).number == 1
    assert to_take(best[:1], own, plan(30), machine).number == 1
    # A plan that does not count is not called slower, nor is it one of those that are compared.
    near = plan(1, tp_comm_overlap=True)
    assert taken([plan(0), near], own, plan(30), machine) == (1, "it is the only plan without hidden messages")
    _, line = taken([plan(0), near, plan(2, recompute_granularity="full")], own, plan(30), machine)
    assert line.startswith("within 5% of the fastest without hidden messages: 1, 3\n")


def test_the_plainest_of_plans_nearly_as_fast_is_made_and_taken():
    """A wave of 4 chunks on 1 pipeline rank hid the plan without any pipeline flag, 0.6% slower."""
    own = parse(Config, [*MODEL.split(), "--global-batch-size", "4"])
    asked = SearchRestrictions(among={"tp": frozenset("1"), "pp": frozenset("1")}, without=frozenset(["sharding"]))
    found = search(own, 2, Machine(GIB), SLOW, 1000, asked=asked)
    first = min(found.best.values(), key=lambda x: x.step)
    plain = min(found.finished, key=lambda x: len(choices(x.config)))
    assert not {"pipeline_schedule", "num_virtual_stages_per_pipeline_rank"} & {*choices(plain.config)}

    def plan(percent: int, **changes):
        config = plain.config.with_fields(**changes)
        return replace(first, step=(1 + percent / 100) * first.step, config=config)

    wave = {"pipeline_schedule": "hanayo", "num_virtual_stages_per_pipeline_rank": 2}
    plans = [plan(0, **wave), plan(2, use_megatron_fsdp=True), plan(4), plan(6)]
    listed = best_of(replace(found, best={0: plans[0]}, finished=plans))
    shown = [x.plan for x in listed]
    assert shown == [plans[0], plans[2]]
    assert [x.why for x in listed] == ["fastest", "fewest settings within 5%"]
    assert to_take(shown, own, None, Machine(GIB)).number == 2
    # The fastest of the plain ones, in whatever order they were made.
    near = [plan(0.9), plan(0.5), plan(0.8)]
    assert plain_instead(plans[0], near) == near[1]


def test_virtual_stages_of_one_pipeline_rank_that_gain_nothing_are_not_on_the_page():
    """A reader of "32 data x 1 pipeline, hanayo" took the schedule for an error; it gained 0.6%."""
    own = parse(Config, [*MODEL.split(), "--global-batch-size", "16", "--num-layers", "8"])
    asked = SearchRestrictions(among={"tp": frozenset("1"), "pp": frozenset("1")}, without=frozenset(["sharding"]))
    # The slower the links, the more gradient sums a wave can hide.
    gains = {}
    for inside in (3e8, 1e10, 1e12):
        device = replace(SLOW, inside=inside, outside=inside)
        # A wave of a run that overlaps sums gains a little where links are fast.
        given = own
        if inside == 1e10:
            given = own.with_fields(overlap_grad_reduce=True, use_distributed_optimizer=True)
        found = search(given, 2, Machine(GIB), device, 1000, asked=asked)
        shown = [x.plan for x in best_of(found)]
        waves = [x for x in shown if x.schedule == "hanayo"]
        plain = {x.layout: x.step for x in found.finished if x.schedule == "1f1b"}
        gains[inside] = [1 - x.step / plain[x.layout] for x in waves]
        assert {x.layout for x in shown} == {x.layout for x in found.best.values()}
        made = {x.schedule for x in found.finished}
        assert ("hanayo" in made) == (inside < 1e12)
    assert gains[1e10] == gains[1e12] == []
    assert gains[3e8]
    assert min(gains[3e8]) > 0.009


def test_where_only_the_schedule_is_free_each_schedule_has_its_plan():
    """Seven schedules were asked for, and the page had one plan and "7 slower than others of their kind"."""
    own = parse(Config, [*MODEL.split(), "--global-batch-size", "16"])
    sizes = {axis: frozenset([value]) for axis, value in {"tp": "2", "pp": "2", "micro": "1"}.items()}
    schedules = {"1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half"}
    asked = SearchRestrictions(
        {**sizes, "schedule": frozenset(schedules), "recompute": frozenset(["none"])},
        frozenset(["sharding", "vocabulary"]),
    )
    plans = [x.plan for x in best_of(search(own, 4, Machine(GIB), SLOW, 1000, asked=asked))]
    shown = [(x.schedule, x.config.parallel.overlap_moe_expert_parallel_comm, x.config.overlaps_tp) for x in plans]
    assert len(shown) == len({*shown})
    assert {name for name, pairs, overlaps in shown if not pairs and not overlaps} == schedules
    assert any(pairs for _, pairs, _ in shown)
    assert plans == sorted(plans, key=lambda x: x.step)


def test_a_plans_flags_are_text_for_a_shell():
    """A layout has the | of a pipe, and was printed without quotes."""
    config = parse(Config, [*MODEL.split(), "--pipeline-model-parallel-layout", "Et|(t|)*2tL"])
    assert shlex.split(pasted(config)) == flags_of(config)
    assert "'Et|(t|)*2tL'" in pasted(config)


def test_where_nothing_fits_the_nearest_plan_has_the_layers_with_which_it_needs_least():
    """It was named with layers divided evenly, which need a sixth more than the least that was found."""
    own = "--num-layers 8 --global-batch-size 2 --untie-embeddings-and-output-weights"
    axes = {"pp": "2", "tp": "1", "micro": "1", "schedule": "zb-v", "recompute": "none", "sharding": "no"}
    found = found_by(own, 2, 0.005 * GIB, SLOW, "moves", **axes)
    peak, candidate = found.least
    assert candidate is not None
    assert candidate.balanced
    assert not found.sketches
    assert found.nearest is not None
    assert found.nearest.peak == pytest.approx(peak)
    assert set(found.nearest.plan.counts) != {2}


@pytest.mark.parametrize("layers", by_night([7, 12], day=[7]))
def test_where_no_sharded_plan_fits_a_device_with_a_little_less_than_the_nearest_has_no_plan(layers):
    """A plan was said to miss by 46 GiB, that missed by one: each layer's weights may be gathered alone."""
    own = f"--num-layers {layers} --hidden-size 128 --use-megatron-fsdp --micro-batch-size 1 --global-batch-size 8"
    axes = {"pp": "1", "tp": "1", "cp": "1", "sharding": "yes"}
    nearest = found_by(own, 4, 0.0005 * GIB, SLOW, "moves", **axes).nearest
    assert nearest is not None
    assert nearest.plan.schedule.placement.num_stages == layers
    assert found_by(own, 4, 1.01 * nearest.peak, SLOW, **axes).best
    assert not found_by(own, 4, 0.95 * nearest.peak, SLOW, "moves", **axes).best


def test_a_candidate_without_a_table_does_not_say_for_those_alike_that_ranks_have_equal_work():
    cell = parse(Config, [*MODEL.split(), "--global-batch-size", "8", "--pipeline-model-parallel-size", "2"])
    few = CandidatePlan(1.0, 1.0, 0, "dualpipe-v", None)
    more = few._replace(least=2.0)
    judging = Judging(SearchResults(), None, [replace(cell, world_size=2)], lambda *_: None)
    assert judging.balanced([more, few], lambda x: None if x == few else True) == [more._replace(balanced=True)]


@pytest.mark.parametrize("own", ["--num-layers 10", "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2"])
def test_stages_that_a_layout_lists_are_not_given_a_second_time(own):
    """A run refused the flags to paste, as both say the stages of a rank."""
    axes = {"pp": "2", "tp": "1", "micro": "1", "schedule": "interleaved", "recompute": "none", "sharding": "no"}
    found = found_by(f"{own} --global-batch-size 8", 2, GIB, SLOW, "moves", "vocabulary", **axes)
    (x,) = found.best.values()
    assert x.config.parallel.pipeline_model_parallel_layout
    given = parse(Config, [*MODEL.split(), *own.split(), "--global-batch-size", "8", *flags_of(x.config)])
    dropped = [name.removeprefix("--").replace("-", "_") for name in left_out(given, x.config)]
    assert dropped == ["num_virtual_stages_per_pipeline_rank"] * ("stages" in own)
    assert not flag_problems(replace(given.with_fields(**dict.fromkeys(dropped)), world_size=2))


def test_a_search_that_ended_after_all_plans_says_so():
    """A page said "stopped at 17,520 of 17,520 plans", and nobody knew whether more time would help."""
    found = SearchResults(far=(17520, 17520))
    found.stop(" when its time was over")
    assert found.stopped.startswith(" after all 17,520 plans when its time was over: none is unseen")
    found = SearchResults(far=(17519, 17520))
    found.stop("")
    assert found.stopped == " at 17,519 of 17,520 plans"
