"""NCCL's rules, played on what ranks ask for; a whole step's on a CUDA device that is not there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from programs import ROOT

from megapipe.config import Config
from megapipe.flags.parse import parse
from megapipe.schedule import Costs, build, simulate, unpaired
from megapipe.schedule.families.vocabulary.shares import with_vocabulary
from megapipe.schedule.recipe import Recipe
from megapipe.training.report.lines import held_up_messages
from tools.proofs.gpu.pairs import figures
from tools.proofs.gpu.passes import records_of
from tools.proofs.gpu.roofline import PEAK
from tools.proofs.gpu.rules import RULES, Ask, Host, Item, Meeting, Wait, Work, play

ONE_BY_ONE = ["device", "launch"]
AS_IT_IS = [rule for rule in RULES if rule not in ONE_BY_ONE]


def send(comm: str, src: int, dst: int, k: int = 0) -> Ask:
    """One end of a message; the other is the same."""
    return Ask(comm, (Meeting((comm, src, dst, k), 2, "4 x float"),))


def both(comm: str, what: str = "sum") -> Ask:
    return Ask(comm, (Meeting((comm, 0), 2, what),))


def test_two_ranks_that_exchange_in_opposite_orders_hang_on_one_communicator():
    to, back = send("pp", 0, 1), send("pp", 1, 0)
    hung = play({0: [to, back, Wait(1)], 1: [back, to, Wait(1)]})
    assert "rank 0: its pp waits for ('pp', 0, 1, 0)" in hung.stuck
    assert "rank 1: its pp waits for ('pp', 1, 0, 0)" in hung.stuck
    assert not play({0: [to, back, Wait(1)], 1: [to, back, Wait(1)]}).wrong
    as_one = Ask("pp", to.meetings + back.meetings)
    assert not play({0: [as_one, Wait(0)], 1: [as_one, Wait(0)]}).wrong
    apart = send("one way", 0, 1), send("other way", 1, 0)
    assert not play({0: [*apart, Wait(1)], 1: [*apart[::-1], Wait(1)]}).wrong


@pytest.mark.parametrize("rule", RULES)
def test_collectives_of_two_communicators_in_opposite_orders_hang_where_one_holds_up_the_other(rule):
    first, second = both("tp"), both("dp")
    played = play({0: [first, second, Wait(0), Wait(1)], 1: [second, first, Wait(0), Wait(1)]}, rule)
    assert bool(played.stuck) == (rule in ("first", *ONE_BY_ONE))


def test_a_host_that_reads_waits_for_its_stream_alone_and_two_that_bring_different_things_are_named():
    ask, rest = both("dp"), [Wait(0), Host("tolist"), Work(1.0)]
    assert play({0: [Work(2.0), ask, *rest], 1: [ask, *rest]}).seconds == 3.0
    assert play({0: [ask, *rest], 1: [*rest[1:]]}).stuck[0] == "rank 0: its host waits for its own stream"
    assert play({0: [ask], 1: [both("dp", "max")]}).unequal == ["('dp', 0): max on rank 1, sum on another"]


def test_a_queue_of_the_device_holds_up_what_stands_behind_a_kernel_that_waits():
    """CUDA_DEVICE_MAX_CONNECTIONS=1: a second message of a communicator, and all behind it, waits for the first."""
    there, back = ([send(comm, *ends, k) for k in (0, 1)] for comm, *ends in (("a", 0, 1), ("b", 1, 0)))
    records: dict[int, list[Item]] = {0: [*there, *back], 1: [*back, *there]}
    assert not play(records).wrong
    assert play(records, "queue").wrong


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved"])
def test_a_step_takes_as_long_as_the_simulator_says_where_messages_cost_nothing(name):
    table = build(name, 4, 8)
    assert play(records_of(table, "plain")).seconds == pytest.approx(simulate(table).makespan)


@pytest.mark.parametrize("mode", ["plain", "batched", "ring"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_no_order_of_messages_hangs(name, mode, monkeypatch):
    """Every schedule, more ranks, evaluations and whole steps: `python -m tools.proofs.gpu orders`."""
    table = build(name, 4, 8)
    records = records_of(table, mode)
    assert [play(records, rule).wrong for rule in AS_IT_IS] == [[]] * len(AS_IT_IS)
    # Before receives kept their places under it, this hung in 103 of 113 plain cases of a review.
    assert bool(play(records, "launch").stuck) == (mode == "plain")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert [play(records_of(table, mode), rule).wrong for rule in ONE_BY_ONE] == [[], []]


@pytest.mark.parametrize("shape", [{"cuts": (0.6, 0.4)}, {"depths": (1, 0)}], ids=str)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_no_order_of_messages_of_slices_and_depths_hangs(name, shape):
    records = records_of(Recipe(name, 2, 4, **shape).whole(), "plain")
    assert [play(records, rule).wrong for rule in AS_IT_IS] == [[]] * len(AS_IT_IS)


def test_in_one_queue_of_a_device_ranks_with_a_shared_vocabulary_do_not_stand_in_a_circle():
    """CUDA_DEVICE_MAX_CONNECTIONS=1, of Megatron-LM's scripts: with receives ahead six ranks of an evaluation did."""
    table = with_vocabulary(build("interleaved", 6, 12))
    assert not play(records_of(table, "plain", evaluate=True), "queue").stuck


def test_links_that_nobody_has_opened_would_meet_in_different_orders():
    table = build("zb-v", 4, 8)
    assert play(records_of(table, "plain", lazy=True), "first").stuck
    assert not play(records_of(table, "plain"), "first").stuck


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipe-v"])
def test_receives_that_wait_beside_a_pass_hold_two_multiprocessors_at_most(name):
    table = build(name, 8, 16)
    assert play(records_of(table, "plain"), message=0.05).idle_ctas < 2.0


def test_messages_in_batches_hold_up_the_next_exchange_of_a_v():
    """One communicator: 1f1b-v takes 9% longer than plain, 1f1b nothing."""
    costs = Costs(f=1.0, b=1.0, w=1.0, comm=0.05)
    slower = {}
    for name in ("1f1b", "1f1b-v"):
        table = unpaired(build(name, 8, 16))
        plain, batched = (
            play(records_of(table, mode, costs=costs), message=0.05).seconds for mode in ("plain", "batched")
        )
        slower[name] = batched / plain
    assert slower["1f1b"] < 1.01 < 1.05 < slower["1f1b-v"]


@pytest.mark.parametrize(("leaves", "alone", "together"), [(0.5, 2 / 11, 0.0), (9.0, 36 / 45, 1 - 9 / 36)])
def test_pairs_hide_the_shorter_of_messages_and_arithmetic(leaves, alone, together):
    """A layer of 3 + 6 seconds of arithmetic with four all-to-alls: alone all are exposed, in pairs what is over."""
    found = figures(3.0, 6.0, 9.0 * PEAK, leaves)
    assert found["exposed alone"] == pytest.approx(alone)
    assert together - 1e-9 <= found["exposed in pairs"] <= together + 0.05
    assert found["MFU alone"] == pytest.approx(9 / (9 + 4 * leaves))
    assert found["step's MFU alone"] < found["step's MFU in pairs"] < found["MFU in pairs"]


@pytest.mark.parametrize("flag", ["", "--no-overlap-p2p-communication", "--use-ring-exchange-p2p"])
@pytest.mark.parametrize("name", ["zb-h1", "v-half"])
def test_a_start_warns_of_batched_messages_where_ranks_have_several_stages(name, flag):
    said = held_up_messages(parse(Config, flag.split()), build(name, 4, 8))
    assert bool(said) == (bool(flag) and name == "v-half")
    assert not said or said.startswith(f"WARNING: {flag} sends the messages of an exchange as one, which holds up")


STEPS = "dualpipe pp 2 experts paired zero-1,zb-v pp 2 copies dp,1f1b pp 2 vocabulary tp"
"""scripts/nightly.sh has every axis under every schedule."""


@pytest.fixture(scope="module")
def judged():
    """Return the lines of all that is judged on a device that is not there: one process, as each imports torch anew."""
    if shutil.which("g++") is None:
        pytest.skip("the fake device is compiled")
    asked = ["waits", "launches", "orders", "steps", "--quick", "--only", STEPS, "roofline", "--json"]
    command = [sys.executable, "-m", "tools.proofs.gpu", *asked]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_on_a_device_that_is_not_there_no_whole_step_hangs_and_the_host_waits_once_in_each(judged):
    """Once more for each layer and microbatch whose rows go to experts elsewhere, as many as routers chose."""
    counts, launches, said, _ = judged
    assert said.startswith("steps: 3 cases, 0 fail;")
    *dense, elsewhere, paired, fixed, graphs, late = json.loads(counts).values()
    assert dense == [{"copy_": 1}] * 7  # tables with every kind of pass; the totals of the step are read
    assert elsewhere == {"copy_": 1 + 2 * 2}
    assert paired == {"copy_": 1 + 4 * 2}
    assert fixed == {"copy_": 1}  # no shape depends on a router
    assert graphs == {"copy_": 1}
    assert late == {"copy_": 1, "synchronize": 1}  # the number of iterations since the last line was 1
    launched, replayed = json.loads(launches)
    # F, B and W of 4 microbatches; beside them copies to and from the buffers, the loss and the update.
    assert replayed["graphs"] == 12
    assert replayed["kernels"] + replayed["graphs"] < launched["kernels"] / 6
    assert (replayed["loss"], replayed["norm"]) == (launched["loss"], launched["norm"])


def test_a_layer_is_at_most_thirty_kernels_and_a_step_above_half_of_the_peak(judged):
    """73 kernels and 36% of an H100's peak before, by the same rates; a review counted them with a tool of its own."""
    small, large, sparse = json.loads(judged[-1])
    for row in small, large:
        assert row["kernels of a layer"] <= 30
        assert row["bytes of a layer over the least"] < 1.3
    assert small["step MFU"] > 0.52
    assert large["layer MFU"] > 0.60
    assert sparse["kernels of a layer"] <= 80  # 77 of which 40 are a router's choice and its order, small ones
    assert sparse["bytes of a layer over the least"] < 1.35
    assert sparse["layer MFU"] > 0.45


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_messages_of_a_shared_vocabulary_hold_as_few(name):
    """9.98 and 7.92 blocks as a mean beside the passes, while those to ranks beyond neighbours had no communicator."""
    table = with_vocabulary(build(name, 8, 16))
    for evaluate in (False, True):
        assert play(records_of(table, "plain", evaluate=evaluate), message=0.05).idle_ctas < 1.0
