"""The best plan that is found, against every plan there is."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest

from megapipe.checks.run import flag_problems
from megapipe.commands.plan.main import main
from megapipe.commands.plan.search.asked import SearchRestrictions
from megapipe.commands.plan.search.report import flags_of, report
from megapipe.commands.plan.search.search import search
from megapipe.commands.plan.search.sliced import try_slices
from megapipe.commands.plan.search.timed import table
from megapipe.commands.plan.search.workers import Workers
from megapipe.commands.plan.verdict import Machine
from megapipe.config import Config
from megapipe.errors import ConfigError, UserError
from megapipe.flags.parse import parse
from megapipe.plan import GIB, counts_of, make_plan, pieces_of, plan_of
from megapipe.plan.seconds.device import DEVICES, Device, load_device
from megapipe.plan.seconds.page import digest
from megapipe.plan.seconds.step import timed
from megapipe.schedule import SCHEDULES
from megapipe.training.check import check

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --train-iters 9 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 "
    "--bf16 "
)
FIXED = {name: entry.chunks for name, entry in SCHEDULES.items() if name != "zb-auto"}
SLOW = Device(flops=1e11, inside=1e9, outside=1e8, latency=1e-5, overhead=1e-5, node=2)


def every_step(config, gpus, memory, device):
    """Of each plan that fits, whatever a search may think of it."""
    model = replace(config.model, padded_vocab_size=config.model.padded_vocab(1000))
    sizes = [n for n in (1, 2, 4) if gpus % n == 0]
    for tp, cp, pp, micro, recompute, zero in product(sizes, sizes, sizes, (1, 2, 4, 8), (None, "full"), (False, True)):
        par = replace(
            config.parallel,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            pipeline_model_parallel_size=pp,
            use_distributed_optimizer=zero,
        )
        one = replace(
            config,
            model=replace(model, recompute_granularity=recompute, sequence_parallel=tp > 1),
            parallel=par,
            batch=replace(config.batch, micro_batch_size=micro),
            world_size=gpus,
        )
        if gpus % (tp * cp * pp) or tp > device.node or flag_problems(one):
            continue
        plan = plan_of(one, pieces_of(one, one.model))
        for name, fixed in FIXED.items() if pp > 1 else [("1f1b", 1)]:
            for chunks in (None,) if fixed else (2, 4):
                with suppress(UserError):
                    schedule = table(name, pp, one.num_microbatches, chunks)
                    counts = counts_of(one, schedule.placement)
                    known = timed(replace(plan, schedule=schedule, counts=counts), one, device)
                    if known.peak <= memory:
                        yield known.step


def test_shares_of_weights_are_among_the_plans_and_hide_what_zero_1_shows_at_the_end():
    flags = [*MODEL.split(), "--num-layers", "8", "--global-batch-size", "8"]
    found = search(parse(Config, flags), 2, Machine(0.02 * GIB), replace(SLOW, inside=1e10), 1000)
    first = min(found.best.values(), key=lambda x: x.step)
    said = " ".join(flags_of(first.config))
    assert {"--use-megatron-fsdp", "breadth-first", "--memory-limit-gib"} <= set(said.split())
    assert "2 data, sharded, x 1 pipeline" in report(found, Machine(0.02 * GIB))
    check(parse(Config, [*flags, *said.split(), "--check", "--world-size", "2"]))
    # It moves no activations, so it is also the best of those that move none, whose flags say as much.
    assert found.plain is not None
    assert not first.moves
    assert found.plain.step == first.step
    assert flags_of(found.plain.config) == said.split()

    def of_zero_1(found):
        plans = (x for x in found.best.values() if x.config.data_parallel_size > 1)
        return min(x.parts["gradient sums"] for x in plans if "sharding" not in x.plan.own)

    asked = SearchRestrictions(without=frozenset(["hiding"]))
    shown = search(parse(Config, flags), 2, Machine(0.02 * GIB), replace(SLOW, inside=1e10), 1000, asked=asked)
    assert first.parts["gradient sums"] < of_zero_1(shown)
    assert of_zero_1(found) < of_zero_1(shown)


@pytest.mark.parametrize(
    "gpus, batch, memory, device",
    [(2, 32, 1.0, SLOW), (4, 4, 1.0, SLOW), (2, 8, 0.0042, replace(SLOW, inside=1e10))],
    ids=["two devices", "four devices", "little memory"],
)
def test_the_best_that_is_found_is_the_best_of_all(gpus, batch, memory, device, capsys):
    flags = [*MODEL.split(), "--global-batch-size", str(batch)]
    config = parse(Config, flags)
    found = search(config, gpus, Machine(memory * GIB), device, 1000)
    steps = sorted(every_step(config, gpus, memory * GIB, device))
    first = min(found.best.values(), key=lambda x: x.step)
    assert first.step <= steps[0] * 1.03
    assert first.peak <= memory * GIB
    check(parse(Config, [*flags, *flags_of(first.config), "--check", "--world-size", str(gpus)]))
    assert f"pipeline schedule {first.schedule}" in capsys.readouterr().out
    assert " ".join(flags_of(first.config)) in report(found, Machine(memory * GIB))


def test_a_layout_that_fits_only_with_some_activations_computed_again_wins_and_trains_as_it_was_found(capsys):
    sizes = "--seq-length 512 --max-position-embeddings 512 --global-batch-size 8 --cross-entropy-loss-fusion"
    flags = [*MODEL.split(), *sizes.split()]
    config, room, far = parse(Config, flags), 0.007 * GIB, replace(SLOW, outside=3e6, node=1)
    found = search(config, 2, Machine(room), far, 1000)
    first = min(found.best.values(), key=lambda x: x.step)
    assert first.moves
    assert first.peak <= room
    best = min(every_step(config, 2, room, far))
    assert found.plain is not None
    assert found.plain.step == pytest.approx(best)
    assert first.step < 0.95 * best
    said = report(found, Machine(room))
    assert f"single activations: {best:.4g} s, {best / first.step - 1:.1%} slower than the first, 1f1b" in said
    alone = report(replace(found, plain=None), Machine(room))
    assert "without copies to the host and second forwards of single activations no plan fits\n" in alone
    check(parse(Config, [*flags, *flags_of(first.config), "--check", "--world-size", "2"]))
    moved = "of 16 activations"
    assert f"{moved} 7 computed again" in said
    assert f"--memory-limit-gib: {moved} of a stage and microbatch 7 computed again" in capsys.readouterr().out


def test_experts_are_shared_where_a_rank_has_no_room_for_all():
    experts = "--num-experts 16 --moe-ffn-hidden-size 512 --untie-embeddings-and-output-weights"
    flags = [*MODEL.split(), *experts.split(), "--global-batch-size", "4"]
    config = parse(Config, flags)
    room = 0.042 * GIB
    found = search(config, 2, Machine(room), SLOW, 1000)
    layouts = {x.layout[4] * x.layout[5] * x.layout[2] for x in found.best.values()}
    assert min(layouts) > 1  # none has all experts of all layers
    assert any(x.layout[4] > 1 for x in found.best.values())
    first = min(found.best.values(), key=lambda x: x.step)
    check(parse(Config, [*flags, *flags_of(first.config), "--check", "--world-size", "2"]))


@pytest.mark.parametrize(
    "flags", ["--recompute-modules mlp", "--num-microbatches-with-partial-activation-checkpoints 1"]
)
def test_a_line_that_says_what_to_compute_again_is_searched_like_any_other(flags):
    """Every layout was refused, since these flags are without effect where nothing is computed again."""
    plain = ["--recompute-granularity", "selective", *MODEL.split(), "--global-batch-size", "4"]
    found = search(parse(Config, [*plain, *flags.split()]), 2, Machine(GIB), SLOW, 1000)
    assert found.best
    assert "refused by the checks of a run" not in found.lost


def test_layouts_of_a_model_with_depths_are_found():
    """The tables that a search tries had no depths, while its costs did: it ended in a ValueError."""
    flags = [*MODEL.split(), "--global-batch-size", "8", "--mtp-num-layers", "4"]
    found = search(parse(Config, flags), 2, Machine(GIB), SLOW, 1000)
    assert any(x.config.parallel.pipeline_model_parallel_size == 2 for x in found.best.values())


@pytest.mark.parametrize("depths", [0, 1])
def test_layers_that_no_number_of_stages_divides_are_split_as_a_run_splits_them(depths):
    """DeepSeek-V3 has 61 layers: a search saw no pipeline for it."""
    given = MODEL.replace("--num-layers 4", f"--num-layers 5 --mtp-num-layers {depths}")
    flags = [*given.split(), "--global-batch-size", "8"]
    found = search(parse(Config, flags), 2, Machine(GIB), SLOW, 1000)
    piped = [x for x in found.best.values() if x.config.parallel.pipeline_model_parallel_size == 2]
    assert piped
    for x in piped[:2]:
        pasted = parse(Config, [*flags, *flags_of(x.config)])
        model = replace(pasted.model, padded_vocab_size=pasted.model.padded_vocab(1000))
        assert make_plan(replace(pasted, model=model, world_size=2)).counts == x.plan.counts


def test_a_first_plan_is_known_before_the_plans_are_counted():
    config = parse(Config, [*MODEL.split(), "--global-batch-size", "8"])
    told: list[tuple[int, int, float | None]] = []
    found = search(config, 4, Machine(GIB), SLOW, 1000, lambda *said: told.append(said))
    (done, among, step), *others = told
    assert (done, among) == (1, 0)
    assert all(among for _, among, *_ in others)
    assert step is not None
    assert min(x.step for x in found.best.values()) <= step


def test_flags_of_a_plan_pasted_after_others_make_that_plan():
    """Those at their defaults were not printed, and what stood before them stayed."""
    flags = [*MODEL.split(), "--num-experts", "4", "--global-batch-size", "4"]
    before = (
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --micro-batch-size 2 "
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    )
    found = search(parse(Config, flags), 1, Machine(GIB), SLOW, 1000)
    for x in found.best.values():
        pasted = parse(Config, [*flags, *before.split(), *flags_of(x.config)])
        assert pasted.parallel == x.config.parallel
        assert pasted.model.moe_token_dispatcher_type == x.config.model.moe_token_dispatcher_type
        assert pasted.batch.micro_batch == x.config.batch.micro_batch


def test_what_does_not_fit_is_said():
    flags = [*MODEL.split(), "--global-batch-size", "4"]
    config = parse(Config, flags)
    found = search(config, 2, Machine(1000.0), SLOW, 1000)
    first, least, verdict, pasted, *_ = report(found, Machine(1000.0)).splitlines()
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


@pytest.mark.parametrize("given", ["1e-300", "0", "NaN", "1e300", "true", '"4e14"'])
def test_a_device_whose_numbers_mean_nothing_is_refused_by_its_field(given, tmp_path):
    (tmp_path / "device.json").write_text(f'{{"flops": {given}}}')
    with pytest.raises(ConfigError, match=r"--rates .*device.json: flops must be a number above 0, from 1e-30 to 1e30"):
        load_device("--rates", str(tmp_path / "device.json"))


def test_slices_fill_a_pipeline_that_two_long_sequences_leave_empty(capsys):
    flags = [*MODEL.split(), *["--seq-length", "4096", "--max-position-embeddings", "4096", "--global-batch-size", "2"]]
    far = replace(SLOW, outside=3e6, node=1)  # too far apart for anything but a pipeline
    found = search(parse(Config, flags), 4, Machine(GIB), far, 1000)
    whole = min(x.step for x in found.best.values())
    try_slices(found, "auto", Machine(GIB), far)
    first = min(found.best.values(), key=lambda x: x.step)
    assert first.step < 0.5 * whole
    chosen = flags_of(first.config)
    assert "--pipeline-slices" in chosen
    check(parse(Config, [*flags, *chosen, "--check", "--world-size", "4"]))
    assert f"pipeline schedule {first.schedule}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--pipeline-slices x is neither a number from 1 to 64 nor auto"):
        main(["--search", *flags, "--world-size", "4", "--pipeline-slices", "x"])


def run_search(words, capsys, tmp_path):
    """Run plan --search as a user does; return its list of plans and what it prints."""
    out = tmp_path / "plans.json"
    main([*MODEL.split(), "--search", "--search-jobs", "2", "--json", str(out), *words.split()])
    return json.loads(out.read_text()), capsys.readouterr()


def test_flags_of_a_search_pasted_make_the_plan_that_it_promised(capsys, tmp_path):
    """A search said 76.8 GiB where a run with its flags has 52.8, and 62.6 where it has 79.3."""
    own = (
        "--global-batch-size 8 --world-size 4 --rates rates.json --use-megatron-fsdp --num-experts 4 "
        "--sequence-parallel --overlap-grad-reduce"
    )
    own = own.replace("rates.json", str(tmp_path / "rates.json"))
    (tmp_path / "rates.json").write_text(json.dumps({"flops": 1e11, "inside": 1e9, "outside": 1e8, "node": 2}))
    best, said = run_search(f"{own} --memory-gib 0.02", capsys, tmp_path)
    assert len(best) > 3
    # Each plan has its own list of flags that cannot be undone by others behind them.
    rest = [line.split() for line in said.out.split("without these of yours: ")[1:]]
    left = [x["leave_out"] for x in best if x["leave_out"]]
    assert [words[: len(names)] for words, names in zip(rest, left, strict=False)] == left
    for found in best:
        split = "--tensor-model-parallel-size 1" not in " ".join(found["flags"])
        assert ("--sequence-parallel" in found["flags"]) == split
        assert "--sequence-parallel" not in found["leave_out"]  # one rank has nothing to split
        line = [word for word in own.split() if word not in found["leave_out"]]
        out = tmp_path / "one.json"
        main([*MODEL.split(), *line, *found["flags"], "--json", str(out)])
        made = json.loads(out.read_text())
        assert made["plan"] == found["plan"]
        assert made["step"]["predicted"]["seconds"] == found["step_s"]
        assert max(made["peak_bytes"]) == found["peak_bytes"]


@pytest.mark.parametrize(
    ("own", "flag"),
    [
        ("--num-experts 4 --among pp=2 ep=2 schedule=1f1b,zb-v sharding=no", "--overlap-moe-expert-parallel-comm"),
        ("--among pp=1 tp=2,4 sharding=no", "--tp-comm-overlap"),
    ],
)
def test_communication_that_can_be_hidden_is_hidden_in_the_best_plans(own, flag, capsys, tmp_path):
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"flops": 1e11, "inside": 1e9, "outside": 1e9, "overhead": 1e-6, "latency": 1e-6}))
    line = f"--global-batch-size 16 --world-size 4 --rates {rates} {own}"
    hidden, said = run_search(line, capsys, tmp_path)
    plain, _ = run_search(f"{line} --without hiding", capsys, tmp_path)
    assert hidden[0]["step_s"] < 0.99 * plain[0]["step_s"]
    assert flag in hidden[0]["flags"]
    assert not any(flag in found["flags"] for found in plain)
    assert "not searched: " in said.out


def test_the_users_overlap_of_gradient_sums_stays_and_is_taken_where_it_shortens_a_step(capsys, tmp_path):
    """It was dropped from every plan, so that shards seemed to beat ZeRO-1 by sums that a run hides."""
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"flops": 1e11, "inside": 1e9, "outside": 1e9, "overhead": 1e-6, "latency": 1e-6}))
    line = f"--global-batch-size 16 --world-size 4 --rates {rates} --among sharding=no pp=1,2"
    own = ["--overlap-grad-reduce", "--ddp-num-buckets", "2"]
    zero = f"{line} --use-distributed-optimizer"
    for best, reduces in (
        (run_search(f"{line} --without hiding", capsys, tmp_path)[0], False),
        (run_search(f"{zero} --without hiding {' '.join(own)}", capsys, tmp_path)[0], True),
        (run_search(f"{zero} {' '.join(own)}", capsys, tmp_path)[0], True),
    ):
        for found in best:
            flags = " ".join(found["flags"])
            assert (" ".join(own) in flags) == (reduces and "--use-distributed-optimizer" in flags)
    taken, _ = run_search(line, capsys, tmp_path)
    plain, _ = run_search(f"{line} --without hiding", capsys, tmp_path)
    assert taken[0]["step_s"] < 0.99 * plain[0]["step_s"]
    assert "--overlap-grad-reduce" in taken[0]["flags"]


def test_the_memory_of_a_host_is_that_of_a_check_for_each_rank_of_its_node(capsys, tmp_path):
    (found, *_), said = run_search("--global-batch-size 8 --world-size 2", capsys, tmp_path)
    line = "--global-batch-size 8 --save somewhere --save-interval 9"
    check(parse(Config, [*MODEL.split(), *line.split(), *found["flags"], "--check", "--world-size", "2"]))
    gib = found["host_bytes"]["save"] / GIB
    assert f"writing it takes up to {gib:.3g} GiB of host memory on a rank" in capsys.readouterr().out
    assert f"on a host 2 ranks need {2 * gib:,.4g} GiB to save: fits" in said.out


def test_plans_whose_save_has_no_room_on_a_host_are_left_out_and_the_page_says_why(capsys, tmp_path):
    """The first plan of Mixtral on 64 devices asked 541 GiB of each rank for a save, 4.2 TiB of a host."""
    line = "--global-batch-size 8 --world-size 4 --pipeline-model-parallel-size 1 --use-distributed-optimizer"
    before, _ = run_search(line, capsys, tmp_path)
    needs = sorted({4 * sum(x["host_bytes"].values()) for x in before})
    limit = (needs[0] + needs[-1]) / 2
    best, said = run_search(f"{line} --host-memory-gib {limit / GIB}", capsys, tmp_path)
    assert best
    assert all(4 * sum(x["host_bytes"].values()) <= limit for x in best)
    assert "without room on the host for a save and copied activations" in said.out
    assert "--no-save-optim saves weights alone" in said.out
    # The user's own plan stays on the page, with what it lacks.
    _, own = said.out.split("\nyours: ")
    assert "on a host 4 ranks need" in own
    assert "does not fit" in own


@pytest.mark.parametrize(("reserved", "least"), [("", 0.9), ("--reserved-gib 0", 1.0)])
def test_a_tenth_of_a_device_stays_free_unless_less_is_asked_for(reserved, least, capsys, tmp_path):
    line = f"--global-batch-size 8 --world-size 2 --memory-gib 0.0042 {reserved}"
    best, said = run_search(line, capsys, tmp_path)
    room = 0.0042 * least
    assert max(x["peak_bytes"] for x in best) <= room * GIB
    spare = [room - x["peak_bytes"] / GIB for x in best]
    assert [f"fits with {gib:.3g} to spare" in said.out for gib in spare] == [True] * len(best)


def test_plans_closer_than_predictions_can_tell_are_called_equal():
    config = parse(Config, [*MODEL.split(), "--global-batch-size", "4"])
    found = search(config, 1, Machine(GIB), SLOW, 1000)
    first = min(found.best.values(), key=lambda x: x.step)
    best = {n: replace(first, step=(1 + n / 100) * first.step) for n in (0, 4, 6)}
    rows = [line for line in report(replace(found, best=best), Machine(GIB)).splitlines() if "% slower" in line]
    assert rows[0].startswith("      equal in time, within 5%: 4.0% slower than the first")
    assert rows[1].startswith("      6.0% slower than the first")


def test_one_plan_says_whether_it_fits_a_device_of_memory_gib(capsys):
    line = [*MODEL.split(), "--global-batch-size", "8"]
    main(line)
    before = capsys.readouterr().out
    peak = max(make_plan(parse(Config, [*line, "--padded-vocab-size", "1024"])).peak_bytes) / GIB
    assert "does not fit" not in before
    for size, says in (
        (2 * peak, f"fits with {1.8 * peak - peak:.3g} to spare"),
        (1.05 * peak, f"tight, needs {peak - 0.945 * peak:.3g} of the {0.105 * peak:.3g} reserved"),
        (0.8 * peak, f"does not fit, {0.2 * peak:.3g} more than a device has"),
    ):
        main([*line, "--memory-gib", str(size)])
        assert f"peak {peak:.3g} GiB: {says}; on a host 1 rank needs " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["H100", "h100"])
def test_a_device_is_known_by_its_name_in_any_case(name):
    assert load_device("--rates", name) == DEVICES["h100"]


def test_a_width_of_experts_that_is_asked_for_is_tried_with_each_of_their_ranks(capsys, tmp_path):
    """Megatron's default etp = tp with ep above 1 was never tried: nothing fitted, for no reason."""
    own = (
        "--global-batch-size 8 --world-size 4 --num-experts 4 --tensor-model-parallel-size 2 "
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --sequence-parallel"
    )
    best, _ = run_search(f"{own} --fix tp ep etp pp", capsys, tmp_path)
    assert {found["flags"][found["flags"].index("--expert-model-parallel-size") + 1] for found in best} == {"2"}
    _, said = run_search(f"{own} --fix tp --among ep=3", capsys, tmp_path)
    assert "no plan of the search has what --fix, --among and --without ask for" in said.out


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
    assert said.err.startswith(f"yours: {mine.step:.4g} s")
    assert "plans, best" in said.err


@pytest.mark.parametrize(
    ("asked", "holds"),
    [
        ("--fix pp --pipeline-model-parallel-size 2", lambda flags: "--pipeline-model-parallel-size 2" in flags),
        ("--among tp=2 pp=1..2", lambda flags: "--tensor-model-parallel-size 2" in flags),
        ("--among schedule=zb-v", lambda flags: "--pipeline-schedule zb-v" in flags),
        ("--without sharding moves recompute", lambda flags: "fsdp" not in flags and "recompute" not in flags),
        ("--without pipeline", lambda flags: "--pipeline-model-parallel-size 1" in flags),
        ("--among sharding=yes", lambda flags: "--use-megatron-fsdp" in flags),
    ],
)
def test_a_search_looks_at_what_it_is_asked_for(asked, holds, capsys, tmp_path):
    best, _ = run_search(f"--global-batch-size 8 --world-size 4 {asked}", capsys, tmp_path)
    assert best
    assert all(holds(" ".join(found["flags"])) for found in best)


def test_a_search_that_is_interrupted_says_its_best_so_far():
    config = parse(Config, [*MODEL.split(), "--global-batch-size", "8"])

    def interrupted(done, among, best, *last):
        if best is not None and not last:
            raise KeyboardInterrupt

    found = search(config, 4, Machine(GIB), SLOW, 1000, interrupted, jobs=2)
    assert found.stopped
    assert found.best
    assert report(found, Machine(GIB)).startswith("the search was stopped; these are the best plans until then\n 1. ")


def test_processes_of_a_search_end_where_sigterm_is_ignored():
    """They inherited that, and the search waited for them for ever."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Workers([2, 3], 2) as workers:
            assert workers.ask(_element, [1, 0, 1]) == [3, 2, 3]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_processes_of_a_search_that_is_killed_end_too():
    """Each had a copy of its own parent's end of the pipe, and waited for questions for ever."""
    program = (
        "from megapipe.commands.plan.search.workers import Workers\n"
        "with Workers(None, 2) as workers:\n"
        "    print(*(child.pid for child in workers._children), flush=True)\n"
        "    input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        children = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(children) == 2
    # The file of a process can be read once the process has ended.
    assert all(select.select([child], [], [], 30)[0] for child in children)


def _element(state, number):
    return state[number]
