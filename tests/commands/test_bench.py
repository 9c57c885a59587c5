"""The benchmark's own facts: a device that keeps time, and rows that count what the schedule says."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
from programs import ROOT, run

from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.flags.parse import parse
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import Costs, Kind, Pass, Schedule, build, loop, simulate, unpaired
from megapipe.schedule.families.offload.copies import with_offload
from megapipe.schedule.families.sharding.sharded import UnshardedStages, with_sharded_weights
from megapipe.schedule.families.step.reduction import exposed, with_reduction
from tools.bench import schedules as bench
from tools.bench.emulate import ways
from tools.bench.emulate.device import Device
from tools.bench.emulate.lanes import Lanes
from tools.bench.emulate.runs import Ours
from tools.bench.published.__main__ import config_of
from tools.bench.published.pairs import pairs
from tools.bench.vocabulary import Model


@pytest.fixture
def device():
    return Device


class Clock:
    """A clock that only sleep moves: what a loaded machine does to a real one is not the device's."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_message_is_there_a_latency_after_it_was_sent_however_late_it_is_asked_for(device, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("tools.bench.emulate.device.time", clock)
    receiver = device(link=0.05, epoch=99.0)
    message = torch.zeros(2, 1, 1)
    receiver.stamp(message)
    receiver.arrive(message, remote=False)
    assert clock.now == 100
    clock.sleep(0.02)
    receiver.arrive(message, remote=True)
    assert clock.now == pytest.approx(100.05, abs=1e-5)
    clock.sleep(1)
    receiver.arrive(message, remote=True)
    assert clock.now == pytest.approx(101.05, abs=1e-5)


def test_a_pass_takes_its_time_and_no_cpu(device):
    one, cpu = device(), time.thread_time()
    one.compute(0.05)
    assert one.busy >= 0.05
    assert time.thread_time() - cpu < 0.02


def test_both_runtimes_run_what_the_table_says(tmp_path):
    """2 ranks, 4 microbatches, both runtimes: peaks and bytes are counted, not copied from the prediction."""
    names = ["1f1b", "interleaved", "zb-v", "dualpipe-v"]
    command = [ROOT / "tools" / "bench" / "schedules.py", "--pp", "2", "--microbatches", "4"]
    command += ["--schedules", ",".join(names), "--ms", "2,2,2", "--repeats", "1", "--message-kib", "1"]
    done = run([*command, "--measure-overhead", "--json", tmp_path / "rows.json"])
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "rows.json").read_text())
    costs, rows = Costs(**written["costs"]), written["rows"]
    assert "measured here: a pass costs" in done.stdout
    assert costs.overhead > 0
    assert [(r["schedule"], r["runtime"]) for r in rows] == [(n, r) for n in names for r in ("megapipe", "torch")]
    for row in rows:
        timeline = simulate(unpaired(build(row["schedule"], 2, 4)))
        known = simulate(unpaired(build(row["schedule"], 2, 4, costs=costs)), costs)
        assert row["predicted_ms"] == pytest.approx(1e3 * known.makespan)
        assert row["step_ms"] >= 2 * timeline.makespan
        assert row["bubble"] > 0
        assert row["peak"] == row["predicted_peak"] == max(timeline.peak)
        assert row["sent_mb"] == (None if row["runtime"] == "torch" else sum(timeline.sent) * 1024 / 1e6)
        assert (row["to_torch"] is None) == (row["runtime"] == "torch")


def test_gathers_for_one_stage_and_for_two_stand_beside_the_plain_table():
    said = "--pp 1 --microbatches 2 --schedules breadth-first --gather-ms 1 --no-torch"
    flags = parse(bench.Flags, said.split())
    jobs = bench._jobs(flags, Costs(a=0.001))
    assert [job.schedule.name for job in jobs] == ["breadth-first", "breadth-first, 1 whole", "breadth-first, 2 whole"]
    assert Kind.AB in jobs[1].schedule.kinds
    with pytest.raises(ConfigError, match="--gather-ms -1 must be a time from 0"):
        bench.main(["--gather-ms", "-1"])


REFUSED = {
    "--steps 3": "--steps acts with --post-validation alone: add --post-validation, or leave it out",
    "--dp 2": "--dp acts with --reduction-mib alone: add --reduction-mib 64, or leave it out",
    "--memory 8": "--memory acts with --pairs alone",
    "--comm-share 0.5": "--comm-share acts with --pairs alone",
    "--comm-pieces 8": "--comm-pieces acts with --pairs alone",
    "--pairs --post-validation": "--pairs and --post-validation are comparisons of their own",
    "--pairs --json x.json": "--json does not go with --pairs",
    "--attention-share 0.5": "--attention-share acts with --slices alone: add --slices 4, or leave it out",
    "--schedules 1f1b --chunks 4": "--chunks 4: --schedules 1f1b leave no choice of chunks",
    "--chunks 0": "--chunks 0 must be at least 1",
    "--pp 1000000000": "--pp 1000000000 must be at least 1 and at most 100000",
    "--link-ms nan": "--link-ms nan must be a time from 0",
    "--copy-ratio nan": "--copy-ratio nan must be a number from 0",
    "--reduction -1": "--reduction -1 must be a number from 0",
    "--pairs --memory nan": "--memory nan must be a number above 0",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_flag_that_would_be_ignored_is_refused(line):
    with pytest.raises(ConfigError) as caught:
        bench.main(line.split())
    assert REFUSED[line] in str(caught.value)


def test_times_that_are_none_are_refused_in_one_line():
    command = [ROOT / "tools" / "bench" / "schedules.py", "--ms", "1,2"]
    done = run(command)
    assert done.returncode == 2
    assert "--ms 1,2 is not three times F,B,W from 0, such as 20,20,20" in done.stderr


def test_a_reduction_is_shown_at_the_end_and_beside_the_passes():
    """interleaved hides half of the link's time in the other chunk's passes."""
    command = [ROOT / "tools" / "bench" / "schedules.py", "--pp", "2", "--microbatches", "4", "--reduction", "0.3"]
    done = run([*command, "--schedules", "interleaved", "--ms", "20,20,20", "--repeats", "1"])
    assert done.returncode == 0, done.stderr
    plain, at_end, beside = (line.split("|")[1:-1] for line in done.stdout.splitlines()[-3:])
    table, link = build("interleaved", 2, 4, chunks=2), 0.3 * 4 * 60
    assert float(plain[3]) >= 4 * 60
    assert float(at_end[5]) == pytest.approx(link)
    assert float(beside[5]) == pytest.approx(exposed(with_reduction(table), Costs(20, 20, 20, g=link))) == link / 2


@pytest.mark.parametrize(
    "row", ["F0 F1F2 F3BW0 BW1BW2 BW3", "F0 F1 B0F2 F3W0 B1B2 B3W1 W2W3", "F0 F1 F2B0 F3BW1 W0 BW2BW3"]
)
def test_two_passes_together_take_what_their_pieces_say_to_the_microsecond(row, monkeypatch):
    """The executor's turns on a clock that only sleep moves, beside the makespan of two lanes."""
    clock = Clock()
    for room in ("tools.bench.emulate.device", "megapipe.distributed.device"):
        monkeypatch.setattr(f"{room}.time", clock)
    steps = [tuple(Pass(Kind(k), 0, int(m)) for k, m in re.findall("([A-Z]+)([0-9])", step)) for step in row.split()]
    table = Schedule("one rank", loop(1), 4, (tuple(steps),))
    costs = ways.with_link(Costs(5.0, 5.0, 4.0), 0.3, 4)
    runner = Ours(ProcessMesh.single(), table, costs, (1, 1, 1))
    runner.step()
    assert clock.now - 100 == pytest.approx(simulate(table, costs).makespan)
    arithmetic = 4 * (0.7 * 14.0)
    assert runner.exposed == pytest.approx(clock.now - 100 - arithmetic)
    assert runner.exposed_in_pairs == pytest.approx(0)


@pytest.mark.parametrize("living", [UnshardedStages(1, 1), UnshardedStages(2, 1, ahead=True), UnshardedStages(3, 2)])
@pytest.mark.parametrize("name", ["breadth-first", "interleaved"])
def test_gathers_on_an_emulated_link_show_as_long_as_predicted(name, living, monkeypatch):
    """The executor's waits on a clock that only sleep moves."""
    clock = Clock()
    for room in ("tools.bench.emulate.device", "tools.bench.emulate.runs", "megapipe.distributed.device"):
        monkeypatch.setattr(f"{room}.time", clock)
    costs = Costs(4.0, 4.0, 4.0, a=7.0, g=10.0)
    table = with_sharded_weights(unpaired(build(name, 1, 4, chunks=3)), costs, living)
    Ours(ProcessMesh.single(), table, costs, (1, 1, 1)).step()
    assert clock.now - 100 == pytest.approx(simulate(table, costs).makespan)


def test_a_model_has_the_same_work_with_a_head_on_its_last_stage_and_a_shared_one():
    """8 layers of 1, 2 and 3 ms in 4 microbatches, and a head worth two of them."""
    for name in ("1f1b", "dualpipe-v"):
        model = Model(name, 2, 4, 4, 2.0, (4, 8, 12))
        for job in (model.whole(), model.shared()):
            assert sum(simulate(job.schedule, job.costs).busy) == pytest.approx(4 * 10 * 6e-3)


class Noted:
    """What all ranks see of a lane's copies, and in which order they wrote it."""

    def __init__(self, seen, written) -> None:
        self.seen, self.written = seen, written

    def __getitem__(self, number: int) -> int:
        return self.seen[number]

    def __setitem__(self, number: int, step: int) -> None:
        self.written.append((step, number))
        self.seen[number] = step


def test_lanes_that_ranks_share_run_their_copies_in_the_order_of_the_table():
    priced, places = Costs(o=0.002, l=0.002), {(stage, i) for stage in (0, 1) for i in range(4)}
    table = with_offload(build("1f1b", 3, 4), priced, chosen=places, switches=[(0, 1)])
    written: list[tuple[int, int]] = []

    def rank(mesh: ProcessMesh) -> float:
        device = Device()
        lanes, back = Lanes(mesh, table, priced, device), {}
        lanes._over = Noted(lanes._over, written)
        for _ in range(2):
            lanes.begin_step()
            for (item,) in table.ranks[mesh.pp.rank]:
                if item.kind is Kind.F:
                    device.hold(1.0)
                if item.kind is Kind.O:
                    lanes.offload(*item[1:3])
                if item.kind is Kind.L:
                    back[item[1:3]] = lanes.load(*item[1:3])
                if item.kind is Kind.BW:
                    back.get(item[1:3], lambda: None)()
                    device.hold(-1.0)
        return device.held

    assert run_threads(rank, pp=3) == [0.0, 0.0, 0.0]
    assert [len(lane.order) for lane in table.shared] == [8, 8]
    for step in (1, 2):
        numbers = [number for at, number in written if at == step]
        assert [x for x in numbers if x < 8] == list(range(8)), "to the host"
        assert [x for x in numbers if x >= 8] == list(range(8, 16)), "and back"


def test_copies_that_a_table_cannot_hide_show_in_the_step():
    command = [ROOT / "tools" / "bench" / "schedules.py", "--pp", "1", "--microbatches", "3", "--copy-ratio", "1"]
    done = run([*command, "--schedules", "1f1b", "--ms", "10,10,10", "--repeats", "1"])
    assert done.returncode == 0, done.stderr
    all_copied = done.stdout.splitlines()[-1].split("|")[1:-1]
    assert [x.strip() for x in all_copied[:3]] == ["1f1b", "all", "150.0"], "each backward waits for both copies"
    assert float(all_copied[3]) >= 150
    assert float(all_copied[5]) == 60


def test_zero_bubble_s_samples_per_second_become_seconds_of_a_step():
    """6.2B, 24 microbatches of 3 sequences on 8 ranks: 3.50 samples per device and second under 1F1B, 4.01 and 3.88."""
    found = [(one, other) for _, one, other in pairs() if one.name == "6.2B, 24"]
    (plain, interleaved), (_, split) = found
    assert plain.seconds == pytest.approx(24 * 3 / (3.50 * 8))
    assert plain.seconds / interleaved.seconds == pytest.approx(4.01 / 3.50)
    assert plain.seconds / split.seconds == pytest.approx(3.88 / 3.50)
    config = config_of(interleaved)
    assert (config.num_microbatches, config.batch.sequence, config.world_size) == (24, 1024, 8)
    # 30 layers, the embedding and the head are one to each of 8 x 4 stages.
    assert config.parallel.num_virtual_stages_per_pipeline_rank == 4


def test_every_published_pair_is_one_model_batch_and_machine():
    """4 with another recomputation, 4 models x 3 batches x 2 schedules, and 4 with unfolded experts."""
    kinds = []
    for what, one, other in pairs():
        kinds.append(what)
        before, after = config_of(one), config_of(other)
        assert (one.device, one.gpus) == (other.device, other.gpus)
        assert before.global_batch_size == after.global_batch_size
        assert before.batch.sequence == after.batch.sequence
        assert (before.model.layers, before.model.hidden) == (after.model.layers, after.model.hidden)
        assert before.model.num_experts == after.model.num_experts
        assert before.parallel != after.parallel or before.model != after.model
    assert {what: kinds.count(what) for what in kinds} == {
        "recomputation": 4,
        "schedule": 24,
        "tensor, pipeline, experts": 4,
    }
