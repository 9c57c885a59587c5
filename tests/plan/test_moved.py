"""--fine-grained-activation-offloading: what the plan's table copies, what it predicts, and the same losses."""

from dataclasses import replace
from functools import partial

import pytest
from short_run import config as short_config
from short_run import run_of, train
from tiny import STYLES

from megapipe.commands.plan import main as plan_command
from megapipe.commands.plan.held_bytes import parts_of
from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import changes, make_plan
from megapipe.plan.families.offload import host_bytes
from megapipe.schedule import Costs, Kind
from megapipe.schedule.costs_file import dump_costs

FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 99 "
    "--padded-vocab-size 128 --lr 1e-3 --train-iters 2 --pipeline-model-parallel-size 4"
)
ON = "--fine-grained-activation-offloading"
SLOW = "--activation-offload-fraction", "0.01"
NAMED = "--offload-modules", "core_attn", "attn_proj"


def plan(*more):
    made = parse(Config, [*FLAGS.split(), *more])
    return make_plan(Config(**{**vars(made), "world_size": 4}).with_batch(8))


def copied(made):
    return {x.stage for row in made.schedule.ranks for step in row for x in step if x.kind is Kind.O}


def test_copies_that_are_fast_leave_two_microbatches_of_four():
    plain, made = plan(), plan(ON, "--offload-time", "0.1")
    assert copied(made) == {0, 1, 2}, "the last stage's backward follows at once"
    assert made.timeline.makespan == plain.timeline.makespan
    one = plain.timeline.peak[0] / 4
    assert plain.timeline.peak[0] == pytest.approx(4 * one)
    assert made.timeline.peak[0] == pytest.approx(2 * one)


def test_the_host_has_the_microbatches_in_flight():
    made = plan(ON, "--offload-time", "0.0001")
    # 1F1B has four microbatches in flight on the first rank, and fast copies of all of them leave.
    assert host_bytes(made) == 4 * made.costs.mem_o[0]
    assert host_bytes(plan()) == 0


def test_the_host_has_slices_and_not_their_microbatches():
    whole = plan(ON, "--offload-time", "0.0001")
    made = plan(ON, "--offload-time", "0.0001", "--pipeline-slices", "2")
    # 1F1B of two slices has five of them in flight on the first of four ranks, nearly halves.
    assert host_bytes(made) == pytest.approx(5 / 2 * whole.costs.mem_o[0], rel=0.03)


def test_a_fraction_of_the_bytes_stays():
    whole, half = (
        plan(ON, "--offload-time", "0.1"),
        plan(ON, "--offload-time", "0.1", "--activation-offload-fraction", "0.5"),
    )
    assert half.costs.mem_o == tuple(0.5 * x for x in half.costs.mem_b)
    assert whole.timeline.peak[0] < half.timeline.peak[0]


def test_named_modules_alone_go():
    some, costs = (plan(*copies, "--offload-time", "0.1") for copies in ((ON, *NAMED), (ON,)))
    layers, tensor, log = 2, 64 * 64 * 4, 64 * 4 * 4  # of a stage; [s, b, h]; [s, b, heads]
    assert some.costs.mem_o == (layers * (4 * tensor + log),) * 4, "queries, keys, values, what attention makes of them"
    assert some.costs.mem_b == costs.costs.mem_b == costs.costs.mem_o
    assert costs.timeline.peak[0] < some.timeline.peak[0] < plan().timeline.peak[0]
    assert some.timeline.peak[0] == pytest.approx(4 * some.costs.mem_b[0] - 2 * some.costs.mem_o[0])


def test_the_solver_counts_what_named_modules_free():
    """More is computed again where their copies are not enough."""
    limit = limit_of(0.45)
    again = []
    for given in ((), NAMED):
        made = plan("--memory-limit-gib", str(limit), "--offload-time", "0.1", *given)
        assert max(made.peak_bytes) <= limit * 2**30
        again.append(sum(x.kind is Kind.R for row in made.schedule.ranks for (x,) in row))
    assert again[0] < again[1]


def test_without_a_time_a_byte_takes_as_long_as_8000_flops():
    costs = plan(ON, *SLOW).costs
    assert costs.o == costs.l == tuple(0.01 * 8000 * x for x in costs.mem_b)


def test_the_forks_flag_copies_the_first_stages_of_each_rank():
    chunks = "--cpu-offload --offload-time 0.1 --num-virtual-stages-per-pipeline-rank 2"
    assert copied(plan(*chunks.split())) == {0, 1, 2, 3, 4, 5, 6}
    assert copied(plan(*chunks.split(), "--offload-chunk-num", "1")) == {0, 1, 2, 3}


def limit_of(share):
    """GiB that leave so much of 1F1B's activations."""
    plain = plan()
    return (max(plain.state_bytes) + share * plain.timeline.peak[0]) / 2**30


@pytest.mark.parametrize("more", [(), (ON,)])
def test_a_memory_limit_is_met_by_what_is_fastest(more):
    plain, limit = plan(), limit_of(0.3)
    made = plan(*more, "--offload-time", "0.5", "--memory-limit-gib", str(limit))
    assert {Kind.O, Kind.R} & made.schedule.kinds
    assert max(made.peak_bytes) <= limit * 2**30
    assert made.timeline.makespan < 1.34 * plain.timeline.makespan, "less than all forwards twice"
    first, *rows = changes(made).splitlines()
    assert first.startswith(f"{ON if more else '--memory-limit-gib'}: of 32 activations of a stage and microbatch ")
    assert len(rows) == 5


def test_a_limit_that_is_wide_changes_nothing_and_one_that_nothing_meets_is_refused():
    assert plan("--memory-limit-gib", "1").schedule == plan().schedule
    with pytest.raises(ConfigError, match="is less than pipeline rank 0 of 1f1b is predicted to need"):
        plan("--memory-limit-gib", str(limit_of(0.1)))


def test_with_zb_auto_the_order_is_chosen_too():
    tight = "--memory-limit-gib", str(limit_of(0.35)), "--offload-time", "0.1"
    made, named = plan(*tight, "--pipeline-schedule", "zb-auto"), plan(*tight)
    assert max(made.peak_bytes) <= limit_of(0.35) * 2**30
    assert made.timeline.makespan < named.timeline.makespan


def test_a_plan_kept_in_a_file_is_that_of_a_later_run(tmp_path, capsys):
    path, tight = str(tmp_path / "kept.json"), ("--offload-time", "0.5", "--memory-limit-gib", str(limit_of(0.3)))
    plan_command.main([*FLAGS.split(), *tight, "--save-schedule", path])
    assert f"the table: {path}, for --pipeline-schedule of a run" in capsys.readouterr().out
    made, kept = plan(*tight), plan(*tight, "--pipeline-schedule", path)
    assert kept.schedule.ranks == made.schedule.ranks
    assert kept.timeline.makespan == made.timeline.makespan
    assert changes(kept).startswith("--pipeline-schedule: of 32 activations")


@pytest.mark.parametrize(
    "more, told",
    [
        ((ON, "--offload-time", "9"), "under 1f1b no activation stays long enough to be copied to the host and back"),
        (
            (ON, "--offload-modules", "expert_fc1"),
            "--offload-modules expert_fc1: nothing of what a forward keeps is theirs, so --fine-grained-activation-off",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(more, told):
    with pytest.raises(ConfigError) as caught:
        plan(*more)
    assert told in str(caught.value)


def _host(mesh, config):
    training = run_of(mesh, config)
    loss = [training.driver.whole().losses["lm loss"] for _ in range(2)]
    stages = training.run.stages
    found = loss, stages.engine.kept["offload"].sizes, stages.stopwatch.copied()
    return *found, parts_of(training)["activations"]


def test_a_run_has_the_same_losses_and_copies_its_share():
    on = {"fine_grained_activation_offloading": True, "offload_time": 0.01, "activation_offload_fraction": 0.5}
    config = short_config(STYLES["llama"], pp=2)
    moved = Config(**{**vars(config), "parallel": type(config.parallel)(**{**vars(config.parallel), **on})})
    plain = run_threads(partial(train, config=config, steps=2), pp=2)
    ranks = run_threads(partial(_host, config=moved), pp=2)
    assert ranks[-1][0] == [loss for loss, _ in plain[-1]]
    (first,) = ranks[0][1][0]
    assert 0.3 < first.copied / first.saved < 0.6
    # A rehearsal counts what the plan predicts.
    assert ranks[0][3] == pytest.approx(make_plan(moved).timeline.peak[0], rel=0.15)


def test_a_run_copies_as_many_bytes_of_named_modules_as_planned():
    asked = {"fine_grained_activation_offloading": True, "offload_time": 0.01, "offload_modules": NAMED[1:]}
    config = short_config(STYLES["llama"], pp=2)
    config = Config(**{**vars(config), "parallel": type(config.parallel)(**{**vars(config.parallel), **asked})})
    ranks, made = run_threads(partial(_host, config=config), pp=2), make_plan(config)
    assert ranks[0][1][0][0].copied == made.costs.mem_o[0]
    for (_, _, copies, _), row in zip(
        ranks, made.schedule.ranks, strict=True
    ):  # each is timed, in the order of the table
        assert [x.item for x in copies] == [x for step in row for x in step if x.kind in (Kind.O, Kind.L)]
        assert all(x.begin <= x.end and x.waited >= 0 for x in copies)


def test_without_a_time_costs_in_seconds_have_a_byte_in_seconds(tmp_path):
    """It took 8000 seconds: no copy was ever in time."""
    (path := tmp_path / "costs.json").write_text(dump_costs(Costs(2.0, 2.0, 2.0)))
    given, counted = plan(ON, *SLOW, "--pipeline-costs", str(path)).costs, plan(ON, *SLOW).costs
    flops = sum(map(sum, (counted.f, counted.b, counted.w))) / 4
    assert given.o == pytest.approx(tuple(6 / flops * 0.01 * 8000 * x for x in counted.mem_b))
    both = replace(Costs(2.0, 2.0, 2.0), o=0.25, l=0.5)
    path.write_text(dump_costs(both))
    assert (given := plan(ON, "--pipeline-costs", str(path)).costs).o == 0.25
    assert given.l == 0.5
