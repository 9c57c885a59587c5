"""tools/gpu_check.py itself, on a CPU: on a GPU it is what has to be right at the first try."""

import json
import os
import sys
import time

import pytest
import torch
from programs import start_ranks

from megapipe.commands.gpu import kernels, measures
from megapipe.commands.gpu import main as gpu_check
from megapipe.commands.gpu.cases import CASES, Case
from megapipe.commands.gpu.main import Outcome, judge
from megapipe.errors import UserError
from megapipe.plan.seconds.device import load_device

A = {n: {"loss": 5.0 - n / 8, "norm": 1.0, "skipped": False} for n in range(1, 4)}


def changed(**values):
    return A | {3: A[3] | values}


def verdict(case, steps, like=A):
    return judge(case, steps, {"a": Outcome("a", "pass", "", steps=like)})[0]


def test_a_case_is_judged_by_its_loss_its_reference_and_its_memory():
    alone, near, bits = Case("x"), Case("x", like="a", within=1e-3), Case("x", like="a")
    assert [verdict(case, A) for case in (alone, near, bits)] == ["pass"] * 3
    assert verdict(alone, A | {3: A[1]}) == "FAIL"  # nothing learned
    assert verdict(near, changed(loss=A[3]["loss"] * 1.0009)) == "pass"
    assert verdict(near, changed(loss=A[3]["loss"] * 1.0011)) == "FAIL"
    assert verdict(bits, changed(norm=1.0 + 2**-52)) == "FAIL"
    for case in (alone, near, bits):
        assert verdict(case, changed(loss=float("nan"))) == verdict(case, changed(skipped=True)) == "FAIL"
    assert verdict(bits, {3: A[3]}) == "pass"  # resumed: what both have
    assert verdict(bits, A, like={}) == "no reference"
    memory = Case("x", memory=0.25)
    for peak, want in ((124, "pass"), (126, "FAIL"), (74, "FAIL")):
        assert verdict(memory, changed(peak=peak, predicted_peak=100)) == want


def test_a_device_that_reaches_too_little_of_its_peak_fails():
    case = Case("x", mfu=0.5)
    assert [verdict(case, {n: step | {"mfu": mfu} for n, step in A.items()}) for mfu in (0.5, 0.4)] == ["pass", "FAIL"]
    assert verdict(case, A) == "pass"  # a device that is not in the table


def test_each_case_stands_behind_its_reference_on_every_device_it_runs_on():
    for n, case in enumerate(CASES):
        if case.like is not None:
            (like,) = [other for other in CASES[:n] if other.name == case.like]
            assert set(case.devices) <= set(like.devices)
            assert like.ranks <= case.ranks


def test_a_case_that_hangs_or_fails_is_ended_and_named(tmp_path):
    began = time.monotonic()
    hang = gpu_check._process([sys.executable, "-S", "-c", "while True: pass"], tmp_path / "a", 0.5)
    assert "over its time limit" in hang
    assert time.monotonic() - began < 30
    fails = gpu_check._process([sys.executable, "-S", "-c", "raise ValueError('why')"], tmp_path / "b", 30)
    assert "exit status 1: ValueError: why" in fails


def test_a_case_on_a_cpu_has_one_thread_unless_the_user_says_more(tmp_path, monkeypatch):
    """Threads that wait for each other beside other programs made 180 s of 3 s."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    case = Case("threads", script="-S -c print(__import__('os').environ['OMP_NUM_THREADS'])")
    for given, expected in ((None, "1"), ("2", "2")):
        if given:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert gpu_check._run(case, gpu_check.Flags(device="cpu"), tmp_path, 30, {})[:2] == ("pass", expected)


def test_the_command_runs_a_training_and_writes_both_tables(tmp_path, capsys):
    flags = ["--device", "cpu", "--output", str(tmp_path), "--minutes", "2", "--only", "float32"]
    with pytest.raises(SystemExit) as end:
        gpu_check.main(flags)
    assert not end.value.code, capsys.readouterr().out
    (row,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert (row["result"], len(row["steps"])) == ("pass", 6)
    assert "| float32 | pass | loss 4.8" in (tmp_path / "report.md").read_text()


# Of each kind one, with its references; scripts/nightly.sh runs all that a CPU can.
FEW = ["kernel: *", "rates of this CPU", "float32", "bf16", "FP8, delayed", "deterministic", "dualpipe-v, *"]
FEW += ["pp 2: ring", "tp 2, sequence parallel", "dp 2: ZeRO-1"]
OF_A_CPU, COUNT = (["*"], 29) if os.environ.get("MEGAPIPE_NIGHTLY") else (FEW, 13)


def test_the_cases_that_a_cpu_can_run_pass(tmp_path, monkeypatch, capsys):
    """Each program is forked: the test above has paid for an interpreter and its imports."""

    def forked(command, log, limit, default=None):
        ranks, program = (int(command[5]), command[6:]) if "torch.distributed.run" in command else (1, command[1:])
        started = start_ranks(ranks, program, log.parent)
        codes = [rank.wait(limit) for rank in started]
        log.write_text("".join(rank.log.read_text() for rank in started))
        return "" if not any(codes) else log.read_text()[-500:]

    monkeypatch.setattr(gpu_check, "_process", forked)
    with pytest.raises(SystemExit) as end:
        gpu_check.main(["--device", "cpu", "--output", str(tmp_path), "--only", *OF_A_CPU])
    assert not end.value.code, capsys.readouterr().out
    assert len(json.loads((tmp_path / "report.json").read_text())["cases"]) == COUNT
    assert load_device("--rates", str(tmp_path / "rates.json")).by_product


def test_a_script_fails_by_its_exit_status_and_its_last_line_is_the_figure(tmp_path):
    for code, want in ((0, ("pass", "two")), (1, ("FAIL", "two; exit status 1"))):
        case = Case("x", script=f"-I -c print('one');print('two');exit({code})")
        result, figure, _ = gpu_check._run(case, gpu_check.Flags(device="cpu"), tmp_path, 30, {})
        assert (result, figure[: len(want[1])]) == want


def test_the_idle_share_counts_overlapping_kernels_once():
    assert measures.idle_share([(0, 4), (1, 2), (3, 6), (8, 10)]) == pytest.approx(0.2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_before_it_runs_anything(tmp_path):
    with pytest.raises(UserError, match=r"finds no GPU\. Add --device cpu to try the command without one\."):
        gpu_check.main(["--output", str(tmp_path)])


@pytest.mark.parametrize("name", kernels.KERNELS)
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
        ),
    ],
)
def test_an_operation_has_the_numbers_of_float64(device, name):
    found = kernels.KERNELS[name](torch.device(device))
    assert found.passed, found


def test_an_unknown_operation_is_refused():
    """A case of gpu-check whose name is misspelt would pass without a check."""
    with pytest.raises(UserError, match="--only norm is none of the checks: weight_grad"):
        kernels.main(["--device", "cpu", "--only", "norm"])


def test_emulated_gpus_run_small_trainings_alone():
    """What needs a compiler, a measure or much memory is left to a real one."""
    flags = gpu_check.Flags(emulated=True, ranks=8)
    chosen = gpu_check.chosen(flags)
    assert {"CUDA graphs", "FP8, tensorwise", "pp 8: dualpipe", "dualpipe-v, resumed at step 3"} <= {
        x.name for x in chosen
    }
    assert not [
        x for x in chosen if x.script or x.memory or x.needs or "--compile" in x.flags or "cuda" not in x.devices
    ]
