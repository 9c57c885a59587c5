"""What the page of a search says of its plans, and which lines of flags are refused."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest
from small_searches import MODEL, SLOW, found_by, page_of, run_search

from megapipe.commands.plan.main import main
from megapipe.commands.plan.one_change import one_change
from megapipe.commands.plan.search.final import of_run
from megapipe.commands.plan.search.listed.asked import SearchRestrictions, allows_change, asked_of
from megapipe.commands.plan.search.report import UserPlan, summary
from megapipe.commands.plan.search.search import search
from megapipe.commands.plan.verdict import Machine
from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.plan import GIB, make_plan
from megapipe.plan.seconds.device import Device, load_device
from megapipe.plan.seconds.page import digest
from megapipe.plan.seconds.step import timed
from megapipe.schedule import SCHEDULES, build
from megapipe.training.check import check


def test_what_does_not_fit_is_said():
    flags = [*MODEL.split(), "--global-batch-size", "4"]
    config = parse(Config, flags)
    found = search(config, 2, Machine(1000.0), SLOW, 1000)
    first, least, verdict, pasted, *_ = page_of(found, Machine(1000.0)).splitlines()
    assert first.startswith("nothing fits: ")
    made = parse(Config, [*flags, *pasted.split()])
    model = replace(made.model, padded_vocab_size=made.model.padded_vocab(1000))
    made = replace(made, model=model, world_size=2)
    plan = make_plan(made)
    assert f"plan {digest(plan, made)}" in least
    assert f"peak {max(plan.peak_bytes) / GIB:.3g} GiB: does not fit" in verdict
    # One sequence at a time on two ranks that share a model, and only inputs of layers are kept.
    assert "--recompute-granularity full" in pasted
    assert "--micro-batch-size 1" in pasted
    assert "2 tensor" in least or "2 pipeline" in least


@pytest.mark.parametrize("sharded", [False, True])
def test_where_nothing_fits_the_page_says_what_state_in_bf16_needs(sharded):
    """The page ended there, although a 6.7B fits four cards of 24 GiB so."""
    flags = [*MODEL.split(), "--global-batch-size", "4"]
    asked = SearchRestrictions({"sharding": frozenset({"yes" if sharded else "no"}), "pp": frozenset("1")})
    found = search(parse(Config, flags), 2, Machine(1000.0), SLOW, 1000, asked=asked)
    _, _, _, pasted, _, verdict, more, *_ = page_of(found, Machine(1000.0)).splitlines()
    made = parse(Config, [*flags, *pasted.split(), *more.split()])
    model = replace(made.model, padded_vocab_size=made.model.padded_vocab(1000))
    made = replace(made, model=model, world_size=2)
    peak, before = (max(make_plan(x).peak_bytes) for x in (made, replace(made, optimizer=type(made.optimizer)())))
    assert f"peak {peak / GIB:.3g} GiB: does not fit" in verdict
    # 6 of 16 or 18 bytes of a parameter.
    assert 0.5 < peak / before < 0.8


SMALL = "--search --global-batch-size 4 --world-size 2"
CALLED_WORLD_SIZE = "is called --world-size, as in megapipe check and megapipe rehearse"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--search --num-layers 0", ("--num-layers 0", "needs --global-batch-size", "needs --world-size")),
        ("--memory-gib nan --global-batch-size 8", ("--memory-gib must be a number above 0, got nan",)),
        ("--search --memory-gib nan --global-batch-size 8", ("--memory-gib must be a number above 0, got nan",)),
        ("--measure", ("--measure is gone: ", "megapipe rehearse times the stages")),
        ("--emulate-ms=3", ("--emulate-ms is gone: ", "tools/bench/schedules.py")),
        ("--search --gpus 64", ("--gpus", CALLED_WORLD_SIZE)),
        ("--search --processes=8", ("--processes", CALLED_WORLD_SIZE)),
        # A search with --save-costs wrote no file, and said nothing of it.
        (f"{SMALL} --save-costs x.json", ("--save-costs is of one plan, and --search compares many.",)),
        (f"{SMALL} --parts", ("--parts is of one plan, and --search compares many.",)),
        (f"{SMALL} --device d.json", ("--device is called --rates now, as in megapipe check",)),
        (f"{SMALL} --fix nodes", ("--fix nodes is no axis of a search. Give some of tp, cp, pp, micro,",)),
        (
            f"{SMALL} --without zb-w",
            ("--without zb-w is neither a schedule (megapipe schedules list) nor one of sharding,",),
        ),
        (f"{SMALL} --among tp=two", ("--among tp=two: tp may have numbers such as 2,4 or 1..8.",)),
        (
            f"{SMALL} --among recompute=some",
            ("--among recompute=some: recompute may have none, selective, full.",),
        ),
        (f"{SMALL} --among tp", ("--among tp must be AXIS=VALUES, such as tp=2,4 or pp=1..8",)),
        (f"{SMALL} --among tp=2 --fix tp", ("--fix tp and --among tp=... exclude each other.",)),
        (f"{SMALL} --why 1", ("--why 1: give two plans, such as --why 1 yours.",)),
        (f"{SMALL} --why 1 99", ("--why 99 is no plan of the list: it has 1 to",)),
        (f"{SMALL} --search-jobs 0", ("--search-jobs must be from 1 to 1024, got 0.",)),
    ],
)
def test_a_line_that_cannot_be_is_refused(line, says):
    with pytest.raises(ConfigError) as refused:
        main([*MODEL.split(), *line.split()])
    assert [words for words in says if words not in str(refused.value)] == []


def test_a_page_is_printed_before_a_wrong_number_of_a_plan_is_refused(capsys):
    """Two minutes of a search were lost to --why 1 99."""
    with pytest.raises(ConfigError, match="--why 99 is no plan of the list"):
        main([*MODEL.split(), *SMALL.split(), "--among", "tp=1", "--why", "1", "99"])
    assert "\n 1. " in capsys.readouterr().out


def test_a_batch_that_devices_cannot_share_is_said_with_those_that_they_can(capsys, tmp_path):
    """A search for 24 devices found only plans of 3 and 6 stages, and 240 sequences had faster ones."""
    _, said = run_search("--global-batch-size 7 --world-size 3 --among pp=1", capsys, tmp_path)
    assert "--global-batch-size 7 is no multiple of 3, so layouts with 3 data-parallel ranks" in said.out
    assert "6 or 9 has them too" in said.out
    # Two tensor-parallel ranks leave three replicas at most, which share 9 sequences.
    _, said = run_search("--global-batch-size 9 --world-size 6 --among pp=1 tp=2", capsys, tmp_path)
    assert "--global-batch-size 9 is no multiple" not in said.out


def test_without_hiding_no_schedule_pairs_passes():
    """The list still had dualpipe-v, whose own table hides messages by pairs."""
    found = asked_of((), (), ("hiding",), parse(Config, MODEL.split()))
    paired = {name for name in SCHEDULES if not found.allows_schedule(name)}
    assert paired == {"dualpipe", "dualpipe-v"}
    tables = {name: build(name, 2, 4) for name in SCHEDULES if not SCHEDULES[name].searched}
    assert paired == {name for name, table in tables.items() if any(len(x) > 1 for row in table.ranks for x in row)}


@pytest.mark.parametrize("given", ["1e-300", "0", "NaN", "1e300", "true", '"4e14"'])
def test_a_device_whose_numbers_mean_nothing_is_refused_by_its_field(given, tmp_path):
    (tmp_path / "device.json").write_text(f'{{"flops": {given}}}')
    with pytest.raises(ConfigError, match=r"--rates .*device.json: flops must be a number above 0, from 1e-30 to 1e30"):
        load_device("--rates", str(tmp_path / "device.json"))


def test_the_memory_of_a_host_is_that_of_a_check_for_each_rank_of_its_node(capsys, tmp_path):
    (found, *_), said = run_search("--global-batch-size 8 --world-size 2", capsys, tmp_path)
    line = "--global-batch-size 8 --save somewhere --save-interval 9"
    check(parse(Config, [*MODEL.split(), *line.split(), *found["flags"], "--check", "--world-size", "2"]))
    gib = found["host_bytes"]["save"] / GIB
    assert f"writing it takes up to {gib:.3g} GiB of host memory on a rank" in capsys.readouterr().out
    assert f"on a host 2 ranks need {2 * gib:,.4g} GiB to save: fits" in said.out


def test_plans_whose_save_has_no_room_on_a_host_are_left_out_and_the_page_says_why(capsys, tmp_path):
    """The first plan of Mixtral on 64 devices asked 541 GiB of each rank for a save, 4.2 TiB of a host."""
    line = "--global-batch-size 8 --world-size 4 --pipeline-model-parallel-size 4 --among micro=1"
    before, _ = run_search(line, capsys, tmp_path)
    needs = sorted({4 * at_once(x) for x in before})
    limit = (needs[0] + needs[-1]) / 2
    best, said = run_search(f"{line} --host-memory-gib {limit / GIB}", capsys, tmp_path)
    assert best
    assert all(4 * at_once(x) <= limit for x in best)
    assert "without room on the host to start, or for a save and copied activations" in said.out
    assert "--no-save-optim saves weights alone" in said.out
    # The user's own plan stays on the page, with what it lacks.
    _, own = said.out.split("\nyours: ")
    assert "on a host 4 ranks need" in own
    assert "does not fit" in own


def at_once(found):
    """The weights that wait at a start are gone when the first activation is copied."""
    need = found["host_bytes"]
    return max(need["start"], need["save"] + need["copies"])


def test_weights_in_shards_wait_on_a_host_at_the_start_and_a_page_says_that_they_need_more_than_a_save():
    """Each of 8 ranks has 2 bytes a weight there. A save of weights alone needs 4 a weight, divided among the 8."""
    flags = "--global-batch-size 8 --use-megatron-fsdp --no-save-optim --padded-vocab-size 1024"
    flags += " --untie-embeddings-and-output-weights"
    config = replace(parse(Config, [*MODEL.split(), *flags.split()]), world_size=8)
    plan = make_plan(config)
    need = 8 * 2 * sum(work.parameters for work in plan.works)
    words = f"on a host 8 ranks need {need / GIB:,.4g} GiB to start"
    for host, verdict in ((need + 1, "fits"), (need - 1e6, "does not fit")):
        machine = Machine(GIB, host=host, ranks=8)
        assert f"{words}: {verdict}" in machine.fits(plan, config)
        assert bool(machine.refuses(plan, config)) == (verdict != "fits")


def test_your_plan_that_has_no_room_is_not_called_faster_without_a_word(capsys, tmp_path):
    line = "--global-batch-size 8 --world-size 2 --memory-gib 0.0035 --among micro=1"
    best, said = run_search(line, capsys, tmp_path)
    assert best
    _, own = said.out.split("\nyours: ")
    assert "does not fit" in own
    assert "faster than all of these, if it had room" in own


@pytest.mark.parametrize(("reserved", "least"), [("", 0.9), ("--reserved-gib 0", 1.0)])
def test_a_tenth_of_a_device_stays_free_unless_less_is_asked_for(reserved, least, capsys, tmp_path):
    line = f"--global-batch-size 8 --world-size 2 --memory-gib 0.0042 --among micro=1 {reserved}"
    best, said = run_search(line, capsys, tmp_path)
    room = 0.0042 * least
    assert max(x["peak_bytes"] for x in best) <= room * GIB
    spare = [room - x["peak_bytes"] / GIB for x in best]
    assert [f"fits with {gib:.3g} to spare" in said.out for gib in spare] == [True] * len(best)


def test_plans_closer_than_predictions_can_tell_are_called_equal():
    found = found_by("--global-batch-size 4", 1)
    first = min(found.best.values(), key=lambda x: x.step)
    best = {n: replace(first, step=(1 + n / 100) * first.step) for n in (0, 4, 6)}
    # How sure a prediction is for plans of other layouts, the same page says: off by 41% and 103%.
    for n, name in enumerate(("tensor_model_parallel_size", "expert_model_parallel_size", "micro_batch_size"), 1):
        other = replace(first.config.with_fields(**{name: 2}), world_size=2)
        best[n] = replace(first, step=(1 + n / 100) * first.step, config=other)
    shown = replace(found, best=best, finished=[*best.values()])
    rows = [line for line in page_of(shown, Machine(GIB)).splitlines() if "% slower" in line]
    assert rows[3].startswith("      equal in time, within 5%: 4.0% slower than the first")
    others = [row.partition(" than the first")[0] for row in (*rows[:3], rows[4])]
    assert others == [f"      {n}.0% slower" for n in (1, 2, 3, 6)]


def test_one_plan_says_whether_it_fits_a_device_of_memory_gib(capsys):
    line = [*MODEL.split(), "--global-batch-size", "8"]
    main(line)
    before = capsys.readouterr().out
    peak = max(make_plan(parse(Config, [*line, "--padded-vocab-size", "1024"])).peak_bytes) / GIB
    assert "does not fit" not in before
    for size, says in (
        (2 * peak, f"fits with {1.8 * peak - peak:.3g} to spare, {0.2 * peak:.3g} reserved"),
        (1.05 * peak, f"tight, needs {peak - 0.945 * peak:.3g} of the {0.105 * peak:.3g} reserved"),
        # Judged by what is not reserved, and counted against that too: it was 4.92 and had to be 7.3.
        (0.8 * peak, f"does not fit, {0.28 * peak:.3g} more than the {0.72 * peak:.3g} GiB that are not reserved"),
    ):
        main([*line, "--memory-gib", str(size)])
        assert f"peak {peak:.3g} GiB: {says}; on a host 1 rank needs " in capsys.readouterr().out


@pytest.mark.parametrize(("name", "gib", "tera"), [("H100", 80, 989), ("RTX 4090", 24, 165.2), ("mi300x", 192, 1307)])
def test_a_device_is_known_by_its_name_as_people_write_it(name, gib, tera):
    device = load_device("--rates", name)
    assert (device.capacity, device.peak) == (gib * GIB, tera * 1e12)


def test_the_users_own_plan_has_its_place_and_its_causes(capsys, tmp_path):
    own = "--global-batch-size 16 --world-size 4 --pipeline-model-parallel-size 4 --why 1 yours"
    best, said = run_search(own, capsys, tmp_path)
    config = replace(parse(Config, [*MODEL.split(), *own.partition(" --why")[0].split()]), world_size=4)
    config = replace(config, model=replace(config.model, padded_vocab_size=config.model.padded_vocab(1001)))
    mine = timed(make_plan(config), config, Device())
    assert f"yours: {mine.step:.4g} s" in said.out
    assert f"{mine.step / best[0]['step_s'] - 1:.1%} slower than the first" in said.out
    table = said.out.partition("seconds of a step")[2].splitlines()[1:]
    rows = {cause: cells for cause, *cells in (re.split(r"  +", line) for line in table)}
    assert {"messages of tensor parallel", "messages of context parallel", "messages of experts"} < rows.keys()
    assert rows["bubble"][1] == f"{mine.parts['bubble']:.4f}"
    assert rows["all"] == [
        f"{best[0]['step_s']:.4f}",
        f"{mine.step:.4f}",
        f"{mine.step - best[0]['step_s']:+.4f}",
    ]
    assert f"yours: {mine.step:.4g} s" in said.err
    numbers = json.loads((tmp_path / "plans.json").read_text())
    assert numbers["yours"]["step_s"] == mine.step
    assert numbers["yours"]["plan"] == digest(mine.plan, config)
    assert numbers["yours"]["one_change"] == [
        line.strip() for line in said.out.splitlines() if line.strip().startswith("one change alone")
    ]
    assert "plans, best" in said.err


def test_a_search_that_is_interrupted_says_how_many_plans_it_has_looked_at():
    config = parse(Config, [*MODEL.split(), "--global-batch-size", "8"])

    def interrupted(done, among, best, *last):
        if among and best is not None and not last:
            raise KeyboardInterrupt

    found = search(config, 4, Machine(GIB), SLOW, 1000, interrupted)
    done, among = found.far
    assert 0 < done < among
    first, second, *_ = page_of(found, Machine(GIB)).splitlines()
    assert first == f"the search was stopped at {done:,} of {among:,} plans; these are the best plans until then"
    assert second.startswith(" 1. ")


def test_a_search_that_is_interrupted_says_its_best_so_far():
    config = parse(Config, [*MODEL.split(), "--global-batch-size", "8"])

    def interrupted(done, among, best, *last):
        if best is not None and not last:
            raise KeyboardInterrupt

    found = search(config, 4, Machine(GIB), SLOW, 1000, interrupted, jobs=2)
    assert found.stopped
    assert found.best
    assert page_of(found, Machine(GIB)).startswith(
        "the search was stopped before it had listed all plans; these are the best plans until then\n 1. "
    )


def own_place(yours_percent, machine, plans=2):
    """What a page says of the place of the user's plan, and all of the page."""
    found = found_by("--global-batch-size 4", 1)
    first = min(found.best.values(), key=lambda x: x.step)
    best = {n: replace(first, step=(1 + 10 * n / 100) * first.step) for n in range(plans)}
    mine = replace(first, step=(1 + yours_percent / 100) * first.step)
    said = page_of(replace(found, best=best, finished=[*best.values()]), machine, yours=UserPlan(mine))
    return said.partition("\nyours: ")[2].splitlines()[2].strip()


def test_a_plan_that_does_not_fit_has_no_place_among_those_that_do():
    """It was number 2 of 3, and a device had no room for it."""
    assert own_place(2, Machine(GIB)).startswith("number 2 of these 2: equal in time, within 5%: 2.0% slower")
    assert own_place(12, Machine(GIB)).startswith("slower than all of these 2: 12.0% slower")
    for percent in (2, 12):
        assert re.match(r"if it had room: .*\d% slower than the first", own_place(percent, Machine(1.0)))


def test_a_page_of_one_plan_does_not_speak_of_all_of_these():
    assert own_place(2, Machine(GIB), plans=1).startswith("equal in time, within 5%: 2.0% slower than the first")


def test_your_plan_is_no_sure_one_if_its_experts_exchange_tokens_between_nodes():
    """It was called 181% slower than the first, where such layouts had been predicted 1.4 and 2 times too slow."""
    found = found_by("--global-batch-size 4", 1)
    mine = next(iter(found.best.values()))
    config = mine.config.with_fields(num_experts=8, expert_model_parallel_size=4)
    for node in (2, 4):
        yours = UserPlan(replace(mine, config=replace(config, world_size=4)))
        said = page_of(found, Machine(GIB), replace(SLOW, node=node), yours)
        assert ("its experts exchange tokens between nodes" in said.partition("\nyours: ")[2]) == (node == 2)


def test_where_the_host_alone_is_short_the_page_says_which_plans_fit_the_devices(capsys, tmp_path):
    """The least plan of memory was shown, of a layout that does not fit the device either."""
    line = "--global-batch-size 8 --world-size 2 --memory-gib 1 --among micro=1"
    best, roomy = run_search(line, capsys, tmp_path)
    short, said = run_search(f"{line} --host-memory-gib 0.002", capsys, tmp_path)
    assert not short
    assert f"the host alone is short: {best[0]['step_s']:.4g} s" in said.out
    assert f"with --no-save-optim this fits: {best[0]['step_s']:.4g} s" in said.out
    assert "least memory" not in said.out
    (words,) = re.findall(r"^ +(--.*) --no-save-optim$", said.out, re.MULTILINE)
    assert words == shlex.join(best[0]["flags"])
    again, _ = run_search(f"{line} --host-memory-gib 0.002 --no-save-optim", capsys, tmp_path)
    assert again[0]["step_s"] == best[0]["step_s"]
    # The smaller checkpoint gives the plan another id, and the page names it.
    assert re.search(rf"with --no-save-optim this fits: .*; plan {again[0]['plan']}$", said.out, re.MULTILINE)
    assert "the host alone is short" not in roomy.out


@pytest.mark.parametrize(
    ("words", "names"),
    [("", True), ("--without dualpipe-v", False), ("--among schedule=1f1b,zb-h1", False), ("--among tp=1", True)],
)
def test_changes_of_one_flag_keep_the_restrictions_of_a_search(words, names):
    """A search without a schedule proposed it as a change of the user's plan."""
    flags = "--global-batch-size 16 --pipeline-model-parallel-size 4"
    config = replace(parse(Config, [*MODEL.split(), *flags.split()]), world_size=4)
    kind, _, values = words.partition(" ")
    given = {"--among": (), "--without": ()} | ({kind: (values,)} if kind else {})
    asked = asked_of((), given["--among"], given["--without"], config)
    for name, allowed in (("dualpipe-v", names), ("1f1b-v", "schedule" not in words)):
        changed = config.with_fields(pipeline_schedule=name)
        assert allows_change(asked, config, changed) == allowed
    full = config.with_fields(recompute_granularity="full")
    assert allows_change(asked, config, full)
    assert not allows_change(SearchRestrictions(without=frozenset(["recompute"])), config, full)


def test_changes_of_one_flag_hide_nothing_where_a_search_is_without_hiding():
    flags = "--global-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    config = replace(parse(Config, [*MODEL.split(), *flags.split(), "--padded-vocab-size", "1024"]), world_size=4)
    mine = of_run(config, SLOW)
    names = re.compile("--(tp-comm-overlap|overlap-grad-reduce|overlap-param-gather)")
    for without, hides in ((frozenset(), True), (frozenset(["hiding"]), False)):
        changes = one_change(mine, SLOW, Machine(GIB), SearchRestrictions(without=without))
        assert bool(names.search(" ".join(x.text for x in changes))) == hides


def test_a_flag_named_after_experts_is_explained_where_a_model_has_none():
    for experts in ("", "--num-experts 2 --moe-router-topk 1"):
        words = [*MODEL.split(), *["--global-batch-size", "8", "--tensor-model-parallel-size", "2"], *experts.split()]
        words += ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "dualpipe-v"]
        words += ["--overlap-moe-expert-parallel-comm", "--padded-vocab-size", "1024"]
        config = replace(parse(Config, words), world_size=4)
        said = summary(of_run(config, SLOW), SLOW)
        assert "passes in pairs" in said
        assert ("which also pairs passes without experts" in said) == (not experts)
