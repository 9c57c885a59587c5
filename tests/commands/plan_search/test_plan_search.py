"""The best plan that is found, against every plan there is."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, product

import pytest
from nightly import by_night
from small_searches import MODEL, SLOW, found_by, page_of, run_search

from megapipe.checks.run import flag_problems
from megapipe.commands.plan.main import main
from megapipe.commands.plan.pasted import flags_of, pasted
from megapipe.commands.plan.search.final import of_run
from megapipe.commands.plan.search.judged.timed import table
from megapipe.commands.plan.search.judged.workers import Workers
from megapipe.commands.plan.search.listed.asked import SearchRestrictions
from megapipe.commands.plan.search.listed.bounds import Counted, fill
from megapipe.commands.plan.search.search import search
from megapipe.commands.plan.search.sliced import try_slices
from megapipe.commands.plan.telling import Telling
from megapipe.commands.plan.verdict import Machine
from megapipe.config import Config
from megapipe.errors import ConfigError, UserError
from megapipe.flags.parse import parse
from megapipe.partition.layout import parse_layout
from megapipe.plan import GIB, counts_of, make_plan, pieces_of, plan_of
from megapipe.plan.seconds.step import timed
from megapipe.schedule import SCHEDULES
from megapipe.training.check import check

FIXED = {name: entry.chunks for name, entry in SCHEDULES.items() if name != "zb-auto"}


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
    own = "--num-layers 8 --global-batch-size 8"
    flags = [*MODEL.split(), *own.split()]
    near = replace(SLOW, inside=1e10)
    found = found_by(own, 2, 0.02 * GIB, near)
    first = min(found.best.values(), key=lambda x: x.step)
    said = " ".join(flags_of(first.config))
    assert {"--use-megatron-fsdp", "breadth-first", "--memory-limit-gib"} <= set(said.split())
    page = page_of(found, Machine(0.02 * GIB))
    assert "2 data, sharded, x 1 pipeline" in page
    assert "a virtual stage is the layers whose weights are gathered" in page
    check(parse(Config, [*flags, *said.split(), "--check", "--world-size", "2"]))
    # It moves no activations, so it is also the best of those that move none, whose flags say as much.
    assert found.plain is not None
    assert not first.moves
    assert found.plain.step == first.step
    assert flags_of(found.plain.config) == said.split()

    def of_zero_1(found):
        plans = (x for x in found.best.values() if x.config.data_parallel_size > 1)
        return min(x.parts["gradient sums"] for x in plans if "sharding" not in x.plan.own)

    shown = found_by(own, 2, 0.02 * GIB, near, "hiding", pp="1", tp="1")
    assert first.parts["gradient sums"] < of_zero_1(shown)
    assert of_zero_1(found) < of_zero_1(shown)


TWO_DEVICES = [(2, 32, 1.0, SLOW), (2, 8, 0.0042, replace(SLOW, inside=1e10))]
SEARCHES = [*TWO_DEVICES, (4, 4, 1.0, SLOW)]


@pytest.mark.parametrize("gpus, batch, memory, device", by_night(SEARCHES, day=TWO_DEVICES))
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
    assert pasted(first.config) in page_of(found, Machine(memory * GIB))


def test_the_bound_of_a_step_without_a_barrier_has_no_start_of_the_pipeline():
    """Ranks spend it on the step before: the bound of a zb-h2 plan was longer than its step."""
    own = "--padded-vocab-size 128 --num-layers 16 --global-batch-size 8 --pipeline-model-parallel-size 4"
    late = f"{MODEL} {own} --pipeline-schedule zb-h2 --enable-optimizer-post-validation"
    config = replace(parse(Config, late.split()), world_size=4)
    least = Counted().least(config, SLOW)
    assert least.work("zb-h2") + fill(least, 4, "zb-h2", None) <= of_run(config, SLOW).step


@pytest.mark.parametrize("schedule, ranks", [("1f1b", 4), ("zb-v", 2)])
def test_layers_are_divided_by_their_work_where_the_head_takes_as_long_as_several(schedule, ranks):
    """Four devices with a vocabulary of 128,256 were given 18.8 s, and 16.74 by hand: all waited for the head."""
    own = "--num-layers 8 --vocab-size 4000 --global-batch-size 8"
    sizes = {"pp": str(ranks), "tp": "1", "schedule": schedule, "recompute": "none", "sharding": "no"}
    found = found_by(own, ranks, GIB, SLOW, "vocabulary", **sizes)
    first = min(found.best.values(), key=lambda x: x.step)
    config = first.config.with_fields(pipeline_model_parallel_layout=None)
    steps = {}
    for cuts in combinations_with_replacement(range(9), first.plan.schedule.placement.chain - 1):
        counts = tuple(after - before for before, after in pairwise((0, *cuts, 8)))
        steps[counts] = timed(replace(first.plan, counts=counts), config, SLOW).step
    assert first.step <= 1.01 * min(steps.values())
    even = max(steps[counts] for counts in steps if set(counts) == {8 // len(counts)})
    assert first.step < 0.99 * even
    assert parse_layout(first.config.parallel.pipeline_model_parallel_layout) == first.plan.counts
    assert f"--pipeline-model-parallel-layout '{first.config.parallel.pipeline_model_parallel_layout}'" in page_of(
        found, Machine(GIB)
    )


def test_a_layout_that_fits_only_with_some_activations_computed_again_wins_and_trains_as_it_was_found(capsys):
    sizes = "--seq-length 512 --max-position-embeddings 512 --global-batch-size 8 --cross-entropy-loss-fusion"
    flags = [*MODEL.split(), *sizes.split()]
    config, room, far = parse(Config, flags), 0.007 * GIB, replace(SLOW, outside=3e6, node=1)
    found = found_by(sizes, 2, room, far)
    first = min(found.best.values(), key=lambda x: x.step)
    assert first.moves
    assert first.peak <= room
    best = min(every_step(config, 2, room, far))
    assert found.plain is not None
    assert found.plain.step == pytest.approx(best)
    assert first.step < 0.95 * best
    said = page_of(found, Machine(room))
    assert f"single activations: {best:.4g} s, {best / first.step - 1:.1%} slower than the first, 1f1b" in said
    alone = page_of(replace(found, plain=None), Machine(room))
    assert "without copies to the host and second forwards of single activations no plan fits\n" in alone
    check(parse(Config, [*flags, *flags_of(first.config), "--check", "--world-size", "2"]))
    moved = "of 16 activations"
    assert f"{moved} 7 computed again" in said
    assert f"--memory-limit-gib: {moved} of a stage and microbatch 7 computed again" in capsys.readouterr().out


def test_experts_are_shared_where_a_rank_has_no_room_for_all():
    experts = "--num-experts 16 --moe-ffn-hidden-size 512 --untie-embeddings-and-output-weights"
    own = f"{experts} --global-batch-size 4"
    found = found_by(own, 2, 0.042 * GIB)
    layouts = {x.layout[4] * x.layout[5] * x.layout[2] for x in found.best.values()}
    assert min(layouts) > 1  # none has all experts of all layers
    assert any(x.layout[4] > 1 for x in found.best.values())
    first = min(found.best.values(), key=lambda x: x.step)
    check(parse(Config, [*MODEL.split(), *own.split(), *flags_of(first.config), "--check", "--world-size", "2"]))


@pytest.mark.parametrize(
    "flags", ["--recompute-modules mlp", "--num-microbatches-with-partial-activation-checkpoints 1"]
)
def test_a_line_that_says_what_to_compute_again_is_searched_like_any_other(flags):
    """Every layout was refused, since these flags are without effect where nothing is computed again."""
    found = found_by(f"--recompute-granularity selective --global-batch-size 4 {flags}", 2)
    assert found.best
    assert "refused by the checks of a run" not in found.lost


def test_layouts_of_a_model_with_depths_are_found():
    """The tables that a search tries had no depths, while its costs did: it ended in a ValueError."""
    found = found_by("--global-batch-size 8 --mtp-num-layers 4", 2, pp="2")
    assert found.best


@pytest.mark.parametrize("depths", [0, 1])
def test_layers_that_no_number_of_stages_divides_are_split_as_a_run_splits_them(depths):
    """DeepSeek-V3 has 61 layers: a search saw no pipeline for it."""
    own = f"--num-layers 5 --mtp-num-layers {depths} --global-batch-size 8"
    piped = found_by(own, 2, pp="2").best
    assert piped
    for x in [*piped.values()][:2]:
        pasted = parse(Config, [*MODEL.split(), *own.split(), *flags_of(x.config)])
        model = replace(pasted.model, padded_vocab_size=pasted.model.padded_vocab(1000))
        assert make_plan(replace(pasted, model=model, world_size=2)).counts == x.plan.counts


def test_a_first_plan_is_known_before_the_plans_are_counted():
    config = parse(Config, [*MODEL.split(), "--global-batch-size", "8"])
    told: list[tuple[int, int, float | None]] = []
    found = search(
        config,
        4,
        Machine(GIB),
        SLOW,
        1000,
        lambda *said: told.append(said),
        asked=SearchRestrictions(without=frozenset(["zb-auto"])),
    )
    (done, among, step), *others = told
    assert (done, among) == (1, 0)
    assert all(among for _, among, *_ in others)
    assert step is not None
    assert min(x.step for x in found.best.values()) <= step


def test_flags_of_a_plan_pasted_after_others_make_that_plan():
    """Those at their defaults were not printed, and what stood before them stayed."""
    own = "--num-experts 4 --global-batch-size 4"
    before = (
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --micro-batch-size 2 "
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    )
    for x in found_by(own, 1).best.values():
        pasted = parse(Config, [*MODEL.split(), *own.split(), *before.split(), *flags_of(x.config)])
        assert pasted.parallel == x.config.parallel
        assert pasted.model.moe_token_dispatcher_type == x.config.model.moe_token_dispatcher_type
        assert pasted.batch.micro_batch == x.config.batch.micro_batch


def test_slices_fill_a_pipeline_that_two_long_sequences_leave_empty(capsys):
    own = "--seq-length 4096 --max-position-embeddings 4096 --global-batch-size 2"
    flags = [*MODEL.split(), *own.split()]
    far = replace(SLOW, outside=3e6, node=1)  # too far apart for anything but a pipeline
    found = found_by(own, 4, GIB, far, tp="1", micro="1", sharding="no")
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
    hidden, said = run_search(line, capsys, tmp_path, "zb-auto vocabulary")
    plain, _ = run_search(line, capsys, tmp_path, "zb-auto vocabulary hiding")
    assert hidden[0]["step_s"] < 0.99 * plain[0]["step_s"]
    assert flag in hidden[0]["flags"]
    assert not any(flag in found["flags"] for found in plain)
    assert "not searched: " in said.out


def test_the_users_overlap_of_gradient_sums_stays_and_is_taken_where_it_shortens_a_step(capsys, tmp_path):
    """It was dropped from every plan, so that shards seemed to beat ZeRO-1 by sums that a run hides."""
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"flops": 1e11, "inside": 1e9, "outside": 1e9, "overhead": 1e-6, "latency": 1e-6}))
    line = f"--global-batch-size 16 --world-size 4 --rates {rates} --among sharding=no tp=1 pp=1"
    own = ["--overlap-grad-reduce", "--ddp-num-buckets", "2"]
    zero = f"{line} --use-distributed-optimizer"
    plain, _ = run_search(line, capsys, tmp_path, "zb-auto hiding")
    for best, reduces in (
        (plain, False),
        (run_search(f"{zero} {' '.join(own)}", capsys, tmp_path, "zb-auto hiding")[0], True),
        (run_search(f"{zero} {' '.join(own)}", capsys, tmp_path)[0], True),
    ):
        for found in best:
            flags = " ".join(found["flags"])
            assert (" ".join(own) in flags) == (reduces and "--use-distributed-optimizer" in flags)
    taken, _ = run_search(line, capsys, tmp_path)
    assert taken[0]["step_s"] < 0.99 * plain[0]["step_s"]
    assert "--overlap-grad-reduce" in taken[0]["flags"]


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


@pytest.mark.parametrize(
    ("asked", "without", "holds"),
    [
        (
            "--fix pp --pipeline-model-parallel-size 2",
            "zb-auto",
            lambda flags: "--pipeline-model-parallel-size 2" in flags,
        ),
        ("--among tp=2 pp=1..2", "zb-auto", lambda flags: "--tensor-model-parallel-size 2" in flags),
        (
            "--among tp=2 --fix recompute --among pp=1",
            "zb-auto",
            lambda flags: "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1" in flags,
        ),
        ("--among schedule=zb-v", "", lambda flags: "--pipeline-schedule zb-v" in flags),
        ("", "zb-auto sharding moves recompute", lambda flags: "fsdp" not in flags and "recompute" not in flags),
        ("", "pipeline", lambda flags: "--pipeline-model-parallel-size 1" in flags),
        ("--among sharding=yes", "zb-auto", lambda flags: "--use-megatron-fsdp" in flags),
    ],
)
def test_a_search_looks_at_what_it_is_asked_for(asked, without, holds, capsys, tmp_path):
    best, _ = run_search(f"--global-batch-size 8 --world-size 4 {asked}", capsys, tmp_path, without)
    assert best
    assert all(holds(" ".join(found["flags"])) for found in best)


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
        "from megapipe.commands.plan.search.judged.workers import Workers\n"
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


def test_a_search_says_that_it_goes_on_while_tables_take_long(monkeypatch, capsys):
    """It said nothing between two tables, which were minutes on a busy machine."""
    monkeypatch.setattr("megapipe.commands.plan.search.judged.workers._PATIENCE", 0.01)
    monkeypatch.setattr("megapipe.commands.plan.telling._EVERY", 0.0)
    event = multiprocessing.get_context("fork").Event()
    telling, told = Telling(), []

    def tell(done):
        telling(done, 5, None, "tables")
        told.append(done)
        if len(told) == 3:
            event.set()

    with Workers(event, 2) as workers:
        assert workers.ask(_waited, [7], 1, tell) == [7]
    assert told[:3] == [0, 0, 0]
    assert told[-1] == 1
    assert "s: 0 of 5 tables, no plan fits yet" in capsys.readouterr().err


def _waited(event, number):
    event.wait(60)
    return number


def _element(state, number):
    return state[number]
