"""From flags to stages and what they cost: what is predicted, shown and refused."""

import re
from dataclasses import replace
from functools import cache

import pytest
from small_plans import config, problems, stages

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.plan import GIB, Plan, changes, counts_of, make_plan, schedule_of, table
from megapipe.plan.make import with_batch
from megapipe.schedule import SCHEDULES, Costs, simulate, verify
from megapipe.schedule.costs_file import dump_costs
from megapipe.schedule.families.offload.rules import MOVES


def test_virtual_stages_by_either_flag_make_the_schedule_interleaved():
    by_layers = stages("--num-layers 8 --num-layers-per-virtual-pipeline-stage 1", 2)
    assert by_layers == stages("--num-layers 8 --num-virtual-stages-per-pipeline-rank 4", 2)
    assert by_layers == ("interleaved", (1,) * 8)
    assert stages("--num-layers 8", 2) == ("1f1b", (4, 4))


def test_a_group_of_microbatches_passes_one_chunk_before_the_next():
    flags = "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2"
    grouped = make_plan(config(f"{flags} --microbatch-group-size-per-virtual-pipeline-stage 4", 2)).schedule
    forwards = [step[0].stage for step in grouped.ranks[0] if str(step[0])[1:2] == "F"][:8]
    assert forwards == [0, 0, 0, 0, 2, 2, 2, 2]  # rank 0 has stages 0 and 2


@pytest.mark.parametrize("tp", [1, 2])
def test_dualpipe_joins_passes_only_where_there_are_collectives_to_hide(tp):
    flags = f"--num-layers 4 --pipeline-schedule dualpipe --tensor-model-parallel-size {tp}"
    schedule = schedule_of(config(f"--pipeline-model-parallel-size 2 {flags}", 2 * tp), 8)
    assert max(len(step) for row in schedule.ranks for step in row) == tp


@pytest.mark.parametrize("layers, most", [(2, 2), (4, 4), (6, 2), (8, 8)])
def test_the_search_takes_only_as_many_stages_as_the_layers_fill(layers, most):
    name, counts = stages(f"--num-layers {layers} --pipeline-schedule zb-auto", 2)
    assert name == "zb-auto"
    assert len(counts) <= most
    assert len(set(counts)) == 1


def test_memory_is_counted_whatever_a_costs_file_says_of_it():
    """That of the shares of the vocabulary was the file's, 0: a ninth of what a rank needs was predicted."""
    plan = planned("gpipe --vocab-parallel-pipeline", 32768)
    told = replace(plan.costs, mem_b=0.0, mem_w=0.0, mem_s=0.0)
    assert replace(plan, given=told).peak_bytes == plan.peak_bytes
    split = planned("zb-h1", 4096)
    assert replace(split, given=replace(split.costs, mem_b=0.0, mem_w=0.0)).peak_bytes == split.peak_bytes


def test_of_a_batch_that_grows_beyond_the_memory_limit_what_has_to_is_moved_out_of_the_way():
    small = wide("--pipeline-schedule gpipe", 4096)
    plan = make_plan(small)
    limit = max(plan.peak_bytes) / GIB * 1.01
    small = replace(small, parallel=replace(small.parallel, memory_limit_gib=limit))
    twice = replace(small, batch=replace(small.batch, global_batch_size=2 * small.global_batch_size))
    grown = with_batch(make_plan(small), twice)
    assert not make_plan(small).schedule.kinds & MOVES
    assert grown.schedule.kinds & MOVES
    assert max(grown.peak_bytes) <= limit * GIB


def test_a_batch_that_begins_with_too_few_microbatches_to_copy_anything_starts_without_copies():
    """`check` asked the last size alone, so the run was refused in its first step."""
    copies = "--fine-grained-activation-offloading --offload-time 2"
    last = replace(wide(f"--pipeline-schedule gpipe {copies}", 4096), world_size=4)
    first = replace(last, batch=replace(last.batch, global_batch_size=last.batch.micro_batch_size))
    plan = make_plan(last)
    assert plan.schedule.kinds & MOVES
    begun = with_batch(plan, first)
    assert begun.schedule.num_microbatches == 1
    assert not begun.schedule.kinds & MOVES


def test_a_search_that_finds_no_order_of_slices_starts_with_the_table_that_the_whole_plan_takes():
    """With fewer microbatches in its first steps the run had an empty table, which was refused in the first one."""
    given = config("--pipeline-schedule zb-auto --pipeline-slices 2 --num-layers 4 --pipeline-model-parallel-size 1", 1)
    given = replace(given, batch=replace(given.batch, micro_batch_size=1, global_batch_size=8))
    begun = with_batch(make_plan(given), given.with_batch(4))
    assert begun.schedule.num_microbatches == 4
    verify(begun.schedule)


def test_a_batch_that_grows_is_searched_with_what_depths_and_partial_recomputation_take():
    """The shares of what is recomputed still counted the depths, and the first step ended in a ValueError."""
    few = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    few = f"{few} --num-microbatches-with-partial-activation-checkpoints 1 --mtp-num-layers 2"
    given = config(f"--pipeline-schedule zb-auto --num-layers 4 --pipeline-model-parallel-size 2 {few}", 2)
    given = replace(given, batch=replace(given.batch, micro_batch_size=1, global_batch_size=8))
    begun = with_batch(make_plan(given), given.with_batch(4))
    assert begun.schedule.num_microbatches == 4
    assert sum(begun.costs.f) == pytest.approx(sum(make_plan(given).costs.f))
    verify(begun.schedule)


WIDE = "--num-layers 16 --hidden-size 256 --pipeline-model-parallel-size 4"


def wide(flags: str, vocab: int) -> Config:
    given = config(f"{WIDE} {flags}", 4)
    return replace(given, model=replace(given.model, padded_vocab_size=vocab))


@cache
def planned(name: str, vocab: int) -> Plan:
    """A search takes seconds."""
    return make_plan(wide(f"--pipeline-schedule {name}", vocab))


def test_zb_auto_is_predicted_no_slower_than_any_schedule_of_its_memory():
    """It was searched with F = B = W whatever the model was: ZB-V was 2.0% shorter by the same prediction."""
    searched = {vocab: planned("zb-auto", vocab) for vocab in (128, 4096)}
    for vocab, auto in searched.items():
        for name in (name for name, entry in SCHEDULES.items() if entry.copies == 1 and name != "zb-auto"):
            other = planned(name, vocab)
            if max(other.timeline.peak) <= max(auto.timeline.peak) * (1 + 1e-9):
                assert auto.timeline.makespan <= other.timeline.makespan * (1 + 1e-9), name
    assert searched[128].schedule != searched[4096].schedule


def test_an_automatic_layout_shares_a_large_vocabulary_alone():
    flags = "--vocab-parallel-pipeline --pipeline-model-parallel-layout auto --pipeline-schedule 1f1b"
    small, large = (make_plan(wide(flags, vocab)) for vocab in (128, 65536))
    assert [plan.schedule.placement.vocabulary for plan in (small, large)] == [False, True]
    assert large.counts == (4, 4, 4, 4)
    assert large.before is not None
    assert large.before.counts == (6, 5, 5, 0)
    assert large.timeline.makespan < 0.7 * large.before.timeline.makespan


def test_without_a_barrier_the_search_shortens_the_longest_span_of_a_rank():
    flags = "--pipeline-schedule zb-auto --num-virtual-stages-per-pipeline-rank 1 --memory-limit-gib 1"
    barrier, late = (make_plan(wide(flags + more, 128)) for more in ("", " --enable-optimizer-post-validation"))
    assert late.timeline.period < barrier.timeline.period <= barrier.timeline.makespan <= late.timeline.makespan


def test_the_search_of_a_run_keeps_its_memory_limit():
    free, lean = planned("zb-auto", 4096), planned("v-half", 4096)
    limit = max(lean.peak_bytes) / GIB
    kept = make_plan(wide(f"--pipeline-schedule zb-auto --memory-limit-gib {limit}", 4096))
    assert max(kept.peak_bytes) <= limit * GIB < max(free.peak_bytes)
    assert free.timeline.makespan < kept.timeline.makespan <= lean.timeline.makespan
    with pytest.raises(
        ConfigError, match=r"--memory-limit-gib 0.01 is less than pipeline rank .*\n +Use --memory-li"
    ) as it:
        make_plan(wide("--pipeline-schedule zb-auto --memory-limit-gib 0.01", 4096))
    assert "a schedule that holds less (v-min), --recompute-granularity full or " in str(it.value)


def test_an_automatic_split_keeps_the_memory_limit():
    """The fastest split gives rank 0, which holds four microbatches, six of the eight layers."""
    flags = "--num-layers 8 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout auto"

    def of_large_vocabulary(more: str) -> Plan:
        given = config(f"{flags} {more}", 2)
        return make_plan(replace(given, model=replace(given.model, padded_vocab_size=2048)))

    free = of_large_vocabulary("")
    limit = 0.99 * max(free.peak_bytes)
    kept = of_large_vocabulary(f"--memory-limit-gib {limit / GIB}")
    assert max(kept.peak_bytes) <= limit
    assert kept.counts[0] < free.counts[0]
    assert not kept.schedule.kinds & MOVES


def test_costs_with_stages_that_no_order_can_have_are_refused_before_a_search(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(dump_costs(Costs((1.0,) * 3, (2.0,) * 3, (1.0,) * 3)))
    flags = f"--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-costs {file} --pipeline-schedule zb-auto"
    said = rf"--pipeline-costs {file}: Costs\.[fbw] names 3 stages, but the model is cut in 2\."
    assert re.search(said, problems(flags, 2))


def test_given_costs_are_what_is_searched_and_predicted(tmp_path):
    file = tmp_path / "costs.json"
    flags = f"--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-costs {file} --pipeline-schedule"
    given = Costs((1.0, 3.0, 1.0, 1.0), (2.0,) * 4, (1.0,) * 4, comm=0.5)  # four stages: two on each rank
    file.write_text(dump_costs(given))
    for name in ("zb-auto", "zb-v"):
        plan = make_plan(config(f"{flags} {name}", 2))
        assert plan.schedule.placement.chain == 4
        assert plan.timeline.makespan == simulate(plan.schedule, given).makespan
        assert plan.peak_bytes[0] > 4 * 1024  # bytes of the plan, not microbatches of the file
    assert f"--pipeline-costs {file}: Costs.f names 4 stages, but the model is cut in 2." in problems(
        f"{flags} 1f1b", 2
    )
    file.write_text(dump_costs(replace(given, mem_r=(1.0,))))
    assert f"--pipeline-costs {file}: Costs.mem_r names 1 stages, but the model is cut in 4." in problems(
        f"{flags} zb-v", 2
    )
    file.write_text("[]")
    assert f"--pipeline-costs {file} is no costs file" in problems(f"{flags} zb-auto", 2)


def test_a_plan_above_the_memory_limit_is_refused_with_its_numbers():
    flags = "--num-layers 4 --pipeline-model-parallel-size 2"
    need = max(make_plan(config(flags, 2)).peak_bytes) / 2**30
    make_plan(config(f"{flags} --memory-limit-gib {need * 1.001}", 2))
    numbers = r"(\S+) GiB: (\S+) for parameters, gradients and optimizer, (\S+) for activations"
    with pytest.raises(ConfigError, match=rf"is predicted to need, {numbers}") as refused:
        make_plan(config(f"{flags} --memory-limit-gib {need * 0.4}", 2))
    whole, state, rest = map(float, re.search(numbers, str(refused.value)).groups())
    assert whole == pytest.approx(need, rel=1e-2)
    assert state + rest == pytest.approx(whole, rel=1e-2)


def test_the_table_has_a_line_for_each_stage_and_global_layer_numbers():
    flags = "--num-layers 6 --pipeline-model-parallel-size 2 --pipeline-schedule zb-v"
    plan = make_plan(config(f"{flags} --pipeline-model-parallel-layout Ett||tttt|L", 2))
    rows = [line.split() for line in table(plan).splitlines()]
    assert [row[:5] for row in rows[1:]] == [
        ["0", "0", "0", "0-1", "embedding"],
        ["1", "1", "0", "-", "-"],
        ["2", "1", "1", "2-5", "-"],
        ["3", "0", "1", "-", "loss"],
    ]
    shares = [float(row[-2].rstrip("%")) for row in rows[1:]]
    assert sum(shares) == pytest.approx(100, abs=0.2)


def test_an_automatic_split_is_shown_beside_the_even_one():
    given = config("--num-layers 6 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout auto", 2)
    given = replace(given, model=replace(given.model, padded_vocab_size=1024))
    before, after = changes(make_plan(given)).splitlines()[1:]
    assert before.split()[:3] == ["before", "step", "1.000"]
    assert before.endswith("Ettt|tttL")
    assert float(after.split()[2]) < 1


def test_counts_come_from_the_placement_not_from_ranks():
    given = config("--num-layers 8 --pipeline-model-parallel-size 2 --pipeline-schedule dualpipe", 2)
    assert counts_of(given, schedule_of(given, 8).placement) == (4, 4)


@pytest.mark.parametrize(
    "flags, shares",
    [
        ("", {"ends": (0, 3)}),
        ("--untie-embeddings-and-output-weights", {}),
        ("--pipeline-schedule zb-v", {}),  # both ends of a V are on one rank
        ("--pipeline-schedule dualpipe --untie-embeddings-and-output-weights", {"twins": (0, 1)}),
        ("--pipeline-schedule dualpipe", {"ends": (0, 3), "twins": (0, 1)}),
    ],
)
def test_only_ties_across_ranks_and_dualpipe_need_groups_of_their_own(flags, shares):
    assert make_plan(config(f"--num-layers 8 --pipeline-model-parallel-size 4 {flags}", 4)).shares == shares


@pytest.mark.parametrize(("half", "whole", "split"), [("", 16, 8 + 8 / 4), ("--bf16", 18, 6 + 12 / 4)])
def test_the_plan_counts_a_share_of_the_optimizer_state(half, whole, split):
    """Bytes of a parameter: weight, float32 gradient, and of ZeRO-1 over 4 ranks a quarter of moments and master."""
    flags = f"--num-layers 4 {half}"
    plain, shared = (make_plan(config(f"{flags} {more}", 4)) for more in ("", "--use-distributed-optimizer"))
    parameters = sum(work.parameters for work in plain.works)
    head = 128 * 32  # tied: a second gradient, nothing else
    assert sum(plain.state_bytes) == whole * (parameters - head) + 4 * head
    assert sum(shared.state_bytes) == split * (parameters - head) + 4 * head


def test_copies_of_dualpipe_keep_no_optimizer_state_neither_of_layers_nor_of_experts():
    """Bytes of a parameter: 4 of weight, 4 of gradient, 8 of moments, which the copy in the other direction lacks."""
    flags = f"{EXPERTS} --pipeline-schedule dualpipe --untie-embeddings-and-output-weights"
    plan = make_plan(config(flags, 2))
    assert plan.works[0].experts > 0
    chain = plan.schedule.placement.chain
    for rank, held in enumerate(plan.state_bytes):
        stages = plan.schedule.placement.stages_on(rank)
        assert held == sum((16 if stage < chain else 8) * plan.works[stage].parameters for stage in stages)


EXPERTS = "--num-layers 8 --num-experts 4 --moe-ffn-hidden-size 16 --pipeline-model-parallel-size 2"
PAIRED = "--expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved-zb --num-layers-per-virtual-pipeline-stage 1"])
def test_a_flag_makes_pairs_in_any_schedule(schedule):
    flags = f"{EXPERTS} --pipeline-schedule {schedule}"
    table, plain = (make_plan(config(f"{flags} {more}", 4, 16)).schedule for more in (PAIRED, ""))
    pairs = [step for row in table.ranks for step in row if len(step) > 1]
    assert pairs
    assert any(len({x.kind.is_forward for x in pair}) == 2 for pair in pairs)
    assert (table.name, table.placement) == (plain.name, plain.placement)
    assert all(len(step) == 1 for row in plain.ranks for step in row)


def test_backwards_without_a_partner_are_split_only_when_asked():
    flags = f"{EXPERTS} {PAIRED} --pipeline-schedule 1f1b"
    whole, split = (make_plan(config(f"{flags} {more}", 4, 16)).schedule for more in ("", "--delay-wgrad-compute"))
    assert not any(kind.is_split for kind in whole.kinds)
    assert any(kind.is_split for kind in split.kinds)


def test_pairs_without_gain_are_refused():
    with pytest.raises(
        ConfigError, match=r"no two passes run together make 1f1b with 1 microbatches shorter\. Leave the flag out, or"
    ):
        make_plan(config(f"{EXPERTS} {PAIRED}", 4, 2))
