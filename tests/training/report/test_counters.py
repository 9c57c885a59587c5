"""A run's own measurements: of real passes on ranks that are threads, emulated to be slow, and what the log says."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import SimpleNamespace

import pytest
from short_run import config, datasets, run_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import STYLES

from megapipe.config import BatchConfig, Config, LogConfig
from megapipe.distributed.axis import CPU, Axis
from megapipe.distributed.device import peak_by_name
from megapipe.distributed.mesh import ProcessMesh
from megapipe.pipeline_parallel.messages.transport import Op
from megapipe.pipeline_parallel.stopwatch import Stopwatch, ran_by_all
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.plan import make_plan
from megapipe.schedule import Costs, build, simulate
from megapipe.schedule.measured.costs import Spent, measured_costs, spent
from megapipe.training.progress import Progress
from megapipe.training.report import compared, numbers
from megapipe.training.report.compared import Measured
from megapipe.training.report.counters import READ, WINDOW, Counters
from megapipe.training.report.lines import LEGEND, iteration_line, short_line
from megapipe.training.report.moment import Moment, Window
from megapipe.training.report.numbers import PASSES, Number, as_json, fields, scalars
from megapipe.training.report.profile import Profiler
from megapipe.training.steps.routers import Routed
from megapipe.training.steps.step import StepResult
from tools.bench.emulate.runs import Ours, _EmulatedLinks


class Late:
    """A message that leaves in the background, 10 ms late."""

    def __init__(self, future: Future) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()

    def is_completed(self) -> bool:
        return self.future.done()


class LateLink(_EmulatedLinks):
    """The link between two ranks is late, both ways."""

    def __init__(self, *given, ends=(2, 3)) -> None:
        super().__init__(*given)
        self.ends, self.pool = ends, ThreadPoolExecutor(1)

    def one(self, op: Op):
        if not op.sends or {self.pp.rank, op.peer} != set(self.ends):
            return super().one(op)
        due = time.monotonic() + 0.01

        def send() -> None:
            time.sleep(max(0.0, due - time.monotonic()))
            super(LateLink, self).one(op).wait()

        return Late(self.pool.submit(send))


def named(mesh: ProcessMesh, wrong: str) -> list[str]:
    """What ten emulated steps of 1F1B name."""
    table, rank = build("1f1b", 4, 4), mesh.pp.rank
    slower = 1.5 if (wrong, rank) == ("rank", 1) else 1.0
    runner = Ours(mesh, table, Costs(*(0.02 * slower,) * 3), (8, 1, 1))
    if wrong == "link":
        runner.transport = runner.comm.transport = LateLink(mesh, runner.device)
    asked = config(STYLES["gpt2"], pp=4)
    counters = Counters(asked, mesh, make_plan(asked), 3, speaks=rank == 3)
    found = []
    for _ in range(10):
        runner.watch = Stopwatch(CPU, table)
        runner.step()
        found += counters.add(runner.watch, over=True)
    return [slow.text for slow in found]


@pytest.mark.parametrize(
    "wrong, text", [("rank", r"stage 1 on rank 1 computes 1\.[3-7] x its peers"), ("link", r"link 2->3 is \d+ ms late")]
)
def test_an_injected_slow_rank_or_link_is_named_within_ten_steps(wrong, text):
    *others, speaker = run_threads(partial(named, wrong=wrong), pp=4, timeout_s=60)
    assert others == [[], [], []]
    assert any(re.match(text, said) for said in speaker), speaker


def train(mesh: ProcessMesh, asked) -> None:
    run_of(mesh, asked).train()


@pytest.mark.parametrize("schedule, late", [("1f1b", True), ("dualpipe-v", False), ("zb-v", False)])
def test_a_run_tells_bubble_and_times_beside_their_prediction(tmp_path, capsys, schedule, late):
    datasets()
    asked = config(STYLES["gpt2"], pp=2, schedule=schedule)
    log = replace(asked.log, log_interval=5, metrics_file=str(tmp_path / "steps"), device_peak_tflops=1.0)
    log = replace(log, log_straggler=schedule == "1f1b")  # --log-straggler
    log = replace(log, timing_log_level=2, timing_log_option="all", tensorboard_dir=str(tmp_path / "board"))
    log = replace(log, log_timers_to_tensorboard=True)
    batch_10 = replace(asked.batch, train_iters=10)
    par = replace(asked.parallel, enable_optimizer_post_validation=late)
    run_threads(partial(train, asked=replace(asked, log=log, parallel=par, batch=batch_10)), pp=2, timeout_s=60)
    said = capsys.readouterr().out
    assert "next to the plan's prediction at the same speed:\nstage  rank      F ms  predicted" in said
    line = next(x for x in said.splitlines() if "iteration       10/" in x)
    fields = re.search(r"\| MFU: .* \| passes \(ms\): ([\d.]+), predicted [\d.]+ \| bubble: ([\d.]+)% \(", line)
    assert fields
    assert said.count(LEGEND) == 1
    assert ("straggler: slowest stage" in said) == (schedule == "1f1b")
    rows = [json.loads(x) for x in (tmp_path / "steps").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, 11))
    row = rows[-1]
    assert 0 < row["bubble"] < 1
    assert sum(row["bubble_parts"].values()) == pytest.approx(row["bubble"])
    assert row["passes_ms"] == max(r["makespan"] for r in row["ranks_ms"])
    assert len(row["stages_ms"]) == (2 if schedule == "1f1b" else 4)
    last = said.split("iteration       10/")[1]
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    for name in ("forward-backward", "optimizer", "batch-generator", "forward-compute", "backward-compute"):
        times = re.search(rf"\n  {name}:\n     rank  0: ([\d.]+)\n     rank  1: ([\d.]+)", last)
        assert times, name
        on_board = events.Scalars(f"{name}-time")
        assert [e.step for e in on_board][-2:] == [5, 10]
        assert on_board[-1].value * 1e3 == pytest.approx(max(map(float, times.groups())), abs=0.01)
    assert row["tokens_per_second"] == pytest.approx(8 * 16 / row["step_ms"] * 1e3)


@pytest.mark.parametrize(
    "columns, ends", [(40, r"bubble +\d+% \(by (FLOPs|times) \d+%\)"), (120, r"lr \d\.\d\de[+-]\d\d")]
)
def test_on_a_terminal_a_line_is_for_people_and_as_wide_as_it(capsys, monkeypatch, columns, ends):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    asked = config(replace(STYLES["gpt2"], num_layers=2), pp=2)
    log = replace(asked.log, log_interval=5, device_peak_tflops=1.0)
    asked = replace(asked, log=log, batch=replace(asked.batch, train_iters=10))
    datasets()
    run_threads(partial(train, asked=asked), pp=2, timeout_s=60)
    lines = [x for x in capsys.readouterr().out.splitlines() if re.match(r" *\d+/10 ", x)]
    assert len(lines) == 3
    for line in lines[1:]:
        assert re.match(r" ?\d+/10  loss \d\.\d{4}  +[\d.]+ ms  +[\d.k]+ tok/s  MFU +\d+%  bubble", line), line
        assert re.search(ends + (r"(  left 0:00:\d\d)?$" if columns < 80 else "$"), line), line
        assert len(line) <= max(80, columns)


@pytest.mark.parametrize(
    "asked, terminal, short",
    [("auto", True, True), ("auto", False, False), ("megatron", True, False), ("short", False, True)],
)
def test_a_file_gets_megatrons_line_unless_log_format_says_otherwise(capsys, monkeypatch, asked, terminal, short):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    run = config(STYLES["gpt2"])
    run = replace(run, optimizer=replace(run.optimizer, lr_warmup_iters=0), batch=replace(run.batch, train_iters=1))
    train(ProcessMesh.single(), replace(run, log=replace(run.log, log_format=asked)))
    said = capsys.readouterr().out
    assert (re.search(r"^ *1/\d+  loss ", said, re.M) is not None) == short
    assert (" iteration        1/" in said) != short


def test_what_a_flag_asks_for_stands_in_the_short_line_too():
    moment = first_of_two({"lm loss": 2.0})
    log = replace(moment.config.log, log_throughput=True, log_params_norm=True, log_num_zeros_in_grad=True)
    result = replace(moment.result, num_zeros=3)
    moment = replace(moment, config=replace(moment.config, log=log), params_norm=5.0, result=result, flops=1e9)
    assert short_line(moment).startswith("1/2  loss 2.0000  0.08 TFLOP/s  zeros 3  params norm 5.000    100 ms")


@pytest.mark.parametrize(("flops", "said"), [(1.5e6, "GFLOP/s per device: 0.12"), (2.5e9, "TFLOP/s per device: 0.2")])
def test_the_speed_of_a_small_model_is_said_in_gflops(flops: float, said: str):
    """0.0005319 TFLOP/s stood in every line of a laptop's run; 80 tokens/s here."""
    assert f"| {said} |" in iteration_line(replace(first_of_two({}), flops=flops), datetime(2026, 1, 1))


@pytest.mark.parametrize("tokens", [{}, {1: (0, 0)}])
def test_without_rows_of_experts_no_expert_is_the_busiest(tokens: dict[int, tuple[int, ...]]):
    moment = first_of_two({})
    moment = replace(moment, result=replace(moment.result, routed=Routed(tokens=tokens)))
    assert "busiest" not in iteration_line(moment, datetime(2026, 1, 1)) + str(as_json(moment))


def test_the_load_of_the_busiest_expert_stands_in_line_board_and_file():
    routed = Routed(tokens={0: (5, 5, 5, 5), 2: (2, 3, 15, 0), 4: (4, 6, 4, 6)})  # 15 rows where the mean is 5
    moment = first_of_two({"lm loss": 2.0})
    moment = replace(moment, result=replace(moment.result, routed=routed))
    assert "| busiest expert: 3.00 x the mean of layer 2 |" in iteration_line(moment, datetime(2026, 1, 1))
    assert short_line(moment, 200).endswith("busiest expert 3.00")
    assert scalars(moment, line=False)["megapipe/busiest-expert"] == as_json(moment)["busiest_expert"] == 3


def test_the_writing_of_a_trace_is_no_part_of_the_next_iteration(tmp_path, monkeypatch):
    """A step of 0.6 s was printed with 17 s, which the trace took."""
    now = [0.0]

    def clock():
        now[0] += 0.001
        return now[0]

    def slow(profiler, iteration):
        now[0] += 100
        usual(profiler, iteration)

    usual = Profiler.close
    monkeypatch.setattr("megapipe.training.report.moment.time", SimpleNamespace(monotonic=clock))

    monkeypatch.setattr(Profiler, "close", slow)
    log = LogConfig(
        metrics_file=f"{tmp_path}/m",
        tensorboard_dir=f"{tmp_path}/board",
        profile=True,
        use_pytorch_profiler=True,
        profile_step_start=1,
        profile_step_end=2,
    )
    asked = config(replace(STYLES["gpt2"], num_layers=1))
    run_of(ProcessMesh.single(), replace(asked, log=log, batch=replace(asked.batch, train_iters=4))).train()
    rows = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [row["step_ms"] < 100 for row in rows] == [True] * 4


def first_of_two(losses: dict[str, float]) -> Moment:
    """The first of two steps of 8 tokens, which takes 100 ms."""
    asked = Config(batch=BatchConfig(micro_batch_size=8, seq_length=1, train_iters=2))
    result = StepResult(losses, 1.0, 8.0, skipped=False, batch=8)
    return Moment(asked, Progress(1, 8), result, Window.of(result, 0.1), lr=1e-3)


def test_a_row_is_all_that_a_logged_number_needs(monkeypatch):
    row = Number(lambda moment: 7.5, "rain (mm): {:.2f}", (0, "rain {:.0f}".format), tag="rain", key="rain_mm")
    monkeypatch.setattr(numbers, "NUMBERS", (*numbers.NUMBERS, row))
    moment = first_of_two({})
    assert iteration_line(moment, datetime(2026, 1, 1)).endswith(
        "| tokens per second: 80 | TFLOP/s per device: 0 | rain (mm): 7.50 |"
    )
    assert "  rain 8    100 ms" in short_line(moment)
    assert scalars(moment, line=False)["rain"] == as_json(moment)["rain_mm"] == 7.5


def test_tags_on_a_board_are_megatrons():
    log = LogConfig(log_throughput=True, log_params_norm=True, log_num_zeros_in_grad=True)
    moment = first_of_two({"lm loss": 2.0})
    result = replace(moment.result, num_zeros=3)
    moment = replace(moment, config=replace(moment.config, log=log), params_norm=5.0, result=result, flops=1e9)
    norms = {"grad-norm": 1.0, "params-norm": 5.0, "num-zeros": 3, "loss-scale": 1.0}
    assert scalars(moment, line=False) == {"lm loss": 2.0, "learning-rate": 1e-3, "batch-size": 8} | norms
    assert scalars(moment, line=True).keys() >= {"iteration-time", "throughput"}


def test_peaks_are_said_in_gib_where_they_are_known():
    (row,) = (row for row in PASSES if row.key == "peak_gib")
    held = SimpleNamespace(peak_bytes=(2**30, 2**31), predicted_peaks=(2**29, 2**31))
    assert row.of(held) == ([1.0, 2.0], [0.5, 2.0])
    assert row.of(SimpleNamespace(peak_bytes=(), predicted_peaks=())) is None


def test_a_file_has_no_times_of_passes_for_a_step_without_any():
    """All other keys are there in every line, with null where a step has no such number."""
    row = as_json(first_of_two({"lm loss": 2.0}))
    assert {"iteration", "losses", "batch"} < row.keys()
    assert not {number.key for number in PASSES if number.key} & row.keys()


@pytest.mark.parametrize("x, text", [(0.5, "0.5"), (999.4, "999"), (999.7, "1k"), (12345.0, "12.3k"), (2e12, "2T")])
def test_a_number_for_people_has_three_digits_and_a_letter(x, text):
    assert numbers.brief(x) == text


def test_a_short_line_shows_the_loss_and_not_a_metric_before_it_in_the_alphabet():
    said = short_line(first_of_two({"hardest token": 5.0, "lm loss": 2.0}))
    assert said == "1/2  loss 2.0000  hardest token 5    100 ms     80 tok/s  norm 1.00  lr 1.00e-03"


@pytest.mark.parametrize("own", [{}, {"sure": 0.25}, {f"metric {n}": n / 7 for n in range(9)}])
def test_metrics_of_ones_own_take_no_other_number_out_of_the_short_line(own):
    plain = short_line(first_of_two({"lm loss": 2.0}))
    theirs = "".join(f"  {name} {value:.4g}" for name, value in own.items())
    assert short_line(first_of_two({"lm loss": 2.0} | own)) == plain.replace("2.0000", f"2.0000{theirs}")


@pytest.mark.parametrize(
    "bubble, parts, text",
    [
        (0.132, (0.111, -0.023, 0.002), "13.2% (table 11.1%, stages -2.3%, host 0.2%, messages 4.2%)"),
        (0.05, (0.111, 0.03, 0.002), "5.0% (table 11.1%, stages 3.0%, host 0.2%, residual -9.3%)"),
        (0.1, (0.1, -1e-9, 1e-9), "10.0% (table 10.0%, stages 0.0%, host 0.0%, messages 0.0%)"),
        (0.1, (0.1, 0.0, 1e-4), "10.0% (table 10.0%, stages 0.0%, host 0.0%, messages 0.0%)"),
    ],
)
def test_the_parts_stand_behind_the_bubble_that_they_add_up_to(bubble, parts, text):
    now = Measured(1, Costs(), (Spent(1, 1, 1, 0),) * 2, 1.0, bubble, *parts, 1.0, 0.186, Costs(), (), ())
    *_, said = fields(PASSES, now)
    assert said == f"bubble: {text}, predicted bubble by FLOPs: 18.6%"


@pytest.mark.parametrize(("predicted", "text"), [(None, "6.0%"), (0.08, "6.0%, predicted 4.0%")])
def test_exposed_communication_is_a_share_of_the_passes_beside_what_costs_say_of_it(predicted, text):
    now = Measured(1, Costs(), (Spent(1, 1, 1, 0),) * 2, 1.0, *(0.1,) * 4, 2.0, 0.1, Costs(), (), (), 0.06, predicted)
    assert list(fields(PASSES, now))[-1] == f"exposed communication: {text}"


def test_a_run_with_collectives_in_its_passes_says_how_long_it_waited_for_them(tmp_path):
    asked = config(STYLES["gpt2"], pp=2, tp=2)
    log = replace(asked.log, metrics_file=str(tmp_path / "m"))
    asked = replace(asked, log=log, batch=replace(asked.batch, train_iters=3))
    run_threads(partial(train, asked=asked), pp=2, tp=2, timeout_s=60)
    row = json.loads((tmp_path / "m").read_text().splitlines()[-1])
    assert 0 < row["exposed_communication"] < 1


def test_no_bubble_is_below_nothing_by_rounding():
    """plan.py printed -0.0%: a rank that computes 0.1 + 0.2 + ... is busy for longer than it is there."""
    for costs in (Costs(f=0.1, b=0.2, w=0.3), Costs(f=1 / 3, b=0.7, w=1e-3)):
        for m in range(1, 40):
            assert f"{simulate(build('1f1b', 1, m), costs).bubble:.1%}" == "0.0%"


def test_the_metrics_file_has_what_the_line_has(tmp_path):
    asked = config(STYLES["gpt2"])
    log = replace(asked.log, log_interval=3, metrics_file=str(tmp_path / "m"))
    log = replace(log, log_params_norm=True, log_num_zeros_in_grad=True)
    training = run_of(ProcessMesh.single(), replace(asked, log=log, batch=replace(asked.batch, train_iters=4)))
    training.train()
    rows = [json.loads(x) for x in (tmp_path / "m").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["params_norm"] == pytest.approx(training.run.optimizer.params_norm())
    assert len({row["params_norm"] for row in rows}) == 4  # of each step
    assert all(isinstance(row["num_zeros"], int) for row in rows)


def test_the_table_shows_milliseconds_and_gib_beside_what_was_predicted():
    times, predicted = (Costs(*((x, x) for x in given)) for given in ((0.01, 0.02, 0.03), (0.04, 0.05, 0.06)))
    gib = 2.0**30
    ranks = (Spent(1.0, 0.9, 0.6, 0.1), Spent(1.0, 0.8, 0.7, 0.1))
    seconds = (0.9, 0.3, 0.1, 0.1, 0.1, 0.8, 0.2)
    now = Measured(1, times, ranks, *seconds, predicted, (2 * gib, 3 * gib), (4 * gib, 5 * gib))
    rows = [line.split() for line in compared.table(now, build("1f1b", 2, 2).placement).splitlines()]
    assert rows[1] == ["0", "0", "10.00", "40.00", "20.00", "50.00", "30.00", "60.00"]
    assert rows[4:] == [["0", "600.0", "100.0", "200.0", "2", "4"], ["1", "700.0", "100.0", "0.0", "3", "5"]]


def test_peaks_are_those_of_the_device_that_is_named():
    assert peak_by_name("NVIDIA H100 80GB HBM3") == 989.4
    assert peak_by_name("NVIDIA H100 PCIe") == 756.0
    assert peak_by_name("NVIDIA A100-SXM4-80GB") == 312.0
    assert peak_by_name("Quadro") is None


def test_the_counters_cost_less_than_half_a_percent_of_a_pass_of_20_ms_on_8_ranks():
    table = build("1f1b", 1, 32)

    def timed(work) -> float:
        """Microseconds of CPU for a pass, the least of twelve times: other programs share the caches."""
        took = []
        for _ in range(12):
            began = time.thread_time()
            passes = sum(work() for _ in range(5))
            took.append((time.thread_time() - began) / passes * 1e6)
        return min(took)

    def step() -> Stopwatch:
        watch = Stopwatch(CPU, table)
        for _ in range(64):
            watch.ask()
            watch.note(watch.mark())
        return watch

    def read() -> int:
        steps = ran_by_all([watch], Axis())
        measured_costs(steps, table.placement, Costs())
        return sum(bool(spent(row)) * len(row) for rows in steps for row in rows)

    watch = step()
    marks, reading = timed(lambda: len(step().passes)), timed(read)
    total = marks + 8 * reading * READ / WINDOW
    print(f"us per pass: marks {marks:.2f}, read {reading:.1f} for each rank; of a step on 8 ranks {total:.1f}")
    assert total < 0.005 * 20_000
