"""Does everything work on this machine's GPU? One command for its first hour; a second GPU adds the cases over NCCL.

megapipe gpu-check --output gpu-check

Each case of cases.py is a process with a time limit, so what fails costs one line. Needs no network, and of
libraries torch and what megapipe itself imports. Exit status 0 if all pass.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from megapipe.commands.gpu.cases import CASES, SHAPE, SIZES, Case
from megapipe.data.files import folder_problems, write_complete
from megapipe.doors import ROOT, in_clone
from megapipe.errors import ConfigError, UserError
from megapipe.flags.parse import parse

GIB = 2**30
Steps = dict[int, dict[str, Any]]
"""Lines of --metrics-file, by iteration; on a GPU with the peak memory of the first rank and its prediction."""


@dataclass(frozen=True)
class Flags:
    """Flags of this tool."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cuda; cpu tries the tool itself, with tiny sizes."""
    minutes: float = 20.0
    """Time for all cases; those that do not come to their turn count as failed."""
    ranks: int | None = None
    """Cases of at most so many processes. (default: as many as there are GPUs, 2 on a CPU)"""
    nanogpt: str | None = None
    """A checkout of nanoGPT to be compared with: git clone https://github.com/karpathy/nanoGPT"""
    output: str = "gpu-check"
    """Folder for the table (report.md, report.json) and each case's output. What is there is replaced."""
    only: tuple[str, ...] = ("*",)
    """Patterns of case names. The cases that those are compared with run too."""


@dataclass(frozen=True)
class Outcome:
    """A row of the table.

    Attributes:
        result: pass, FAIL, or why it could not be judged.
        figure: what was measured.
    """

    case: str
    result: str
    figure: str
    seconds: float = 0.0
    steps: Steps = field(default_factory=dict, repr=False)


def main(argv: Sequence[str]) -> None:
    flags = parse(Flags, argv)
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device cuda: torch {torch.__version__} finds no GPU. --device cpu tries the tool without")
    if flags.nanogpt is not None and not in_clone():
        raise ConfigError("--nanogpt needs a clone of megapipe: the training that is compared with is in tools/bench.")
    if flags.ranks is not None and flags.ranks < 1:
        raise ConfigError(f"--ranks must be at least 1, got {flags.ranks}")
    problems = list(folder_problems({"--output": flags.output}))
    if not flags.minutes > 0:
        problems.append(f"--minutes {flags.minutes:g} must be above 0")
    for pattern in flags.only:
        if not any(fnmatch(case.name, pattern) for case in CASES):
            problems.append(f"--only {pattern} is none of the cases: {', '.join(case.name for case in CASES)}")
    cases = chosen(flags) if not problems else []
    if not problems and not cases:
        here = ", ".join(case.name for case in chosen(replace(flags, only=("*",)))) or "none"
        problems.append(f"--only {' '.join(flags.only)}: none of these cases runs here. Those that do: {here}")
    if problems:
        raise ConfigError(problems)
    folder = Path(flags.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "saved", ignore_errors=True)  # an older run's checkpoints
    machine = _machine(flags.device)
    print(machine, flush=True)
    outcomes = _run_all(cases, flags, folder)
    rows = [asdict(o) for o in outcomes]
    (folder / "report.json").write_text(json.dumps({"machine": machine, "cases": rows}, indent=1))
    write_complete(folder / "report.md", f"{machine}\n\n{markdown(outcomes)}\n")
    failed = sum(o.result != "pass" for o in outcomes)
    print(f"{len(outcomes) - failed} of {len(outcomes)} pass; {folder / 'report.md'}")
    raise SystemExit(failed > 0)


def chosen(flags: Flags) -> list[Case]:
    """The cases that can run here and are asked for, each behind the one that it is compared with."""
    ranks = flags.ranks or (torch.cuda.device_count() if flags.device == "cuda" else 2)
    has = {None: True, "nanogpt": flags.nanogpt is not None}
    has |= {case.needs: find_spec(case.needs) is not None for case in CASES if case.needs not in (None, "nanogpt")}
    has["pytest"] &= in_clone()  # where the tests are
    here = [case for case in CASES if flags.device in case.devices and case.ranks <= ranks and has[case.needs]]
    wanted = {case.name for case in here if any(fnmatch(case.name, pattern) for pattern in flags.only)}
    for case in reversed(here):
        if case.name in wanted and case.like:
            wanted.add(case.like)
    return [case for case in here if case.name in wanted]


def _run_all(cases: Sequence[Case], flags: Flags, folder: Path) -> list[Outcome]:
    until = time.monotonic() + 60 * flags.minutes
    outcomes: dict[str, Outcome] = {}
    width = max((len(case.name) for case in cases), default=0)
    for case in cases:
        began = time.monotonic()
        result, figure, steps = "no time left", f"--minutes {flags.minutes:g} were over", Steps()
        if (left := until - began) > 0:
            result, figure, steps = _run(case, flags, folder, min(left, case.seconds), outcomes)
        outcome = outcomes[case.name] = Outcome(case.name, result, figure, time.monotonic() - began, steps)
        print(f"{case.name:{width}}  {result:5}  {outcome.seconds:5.1f} s  {figure}", flush=True)
    return [*outcomes.values()]


def _run(case: Case, flags: Flags, folder: Path, limit: float, before: Mapping[str, Outcome]) -> tuple[str, str, Steps]:
    """Result, figure and steps of one case in a process of its own."""
    place = folder / "".join(c if c.isalnum() else "-" for c in case.name)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    log, file = place / "output.txt", place / "steps.jsonl"
    # Two threads of torch wait for each other in every product: beside two other programs on two cores the case of
    # every schedule took 180 s in place of 3.
    threads = {"OMP_NUM_THREADS": "1"} if flags.device == "cpu" else {}
    problem = _process(_command(case, flags, folder, file), log, limit, threads)
    if case.script:
        last = log.read_text().strip().splitlines()[-1]
        return ("FAIL", f"{last}; {problem}", {}) if problem else ("pass", last, {})
    steps = {step["iteration"]: step for step in map(_step, file.read_text().splitlines() if file.exists() else ())}
    if problem or not steps:
        return "FAIL", problem or "no steps", steps
    result, figure = judge(case, steps, before)
    return result, f"{figure}; {speed(steps)}", steps


def _step(line: str) -> dict[str, Any]:
    """The numbers of a line of the file; no mfu and no memory where they are not known."""
    told = json.loads(line)
    loss = told["losses"]["lm loss"]
    step = {name: told[name] for name in ("iteration", "skipped", "tokens_per_second")}
    step |= {"loss": math.nan if loss is None else loss, "norm": told["grad_norm"], "tflops": told["tflops_per_device"]}
    step |= {} if told["mfu"] is None else {"mfu": told["mfu"]}
    if "peak_gib" in told:
        step |= {"peak": told["peak_gib"][0] * GIB, "predicted_peak": told["predicted_peak_gib"][0] * GIB}
    return step


def _command(case: Case, flags: Flags, folder: Path, file: Path) -> list[str]:
    if case.script:
        known = {"device": flags.device, "nanogpt": str(Path(flags.nanogpt or "").resolve())}
        return [sys.executable, *(part.format_map(known) for part in case.script.split())]
    run = f"{SHAPE} {SIZES[flags.device]} {case.flags}".split()
    run += ["--distributed-backend", "gloo"] if flags.device == "cpu" else []
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    start = [*(many if case.ranks > 1 else ()), "-m", "megapipe", "pretrain", "--metrics-file", str(file)]
    return [sys.executable, *start, *(part.format(folder=folder) for part in run)]


def _process(command: Sequence[str], log: Path, limit: float, default: Mapping[str, str] | None = None) -> str:
    """Run it; why it failed, or nothing. default: of its environment, where ours says nothing."""
    clone = {"PYTHONPATH": str(ROOT)} if in_clone() else {}
    env = dict(default or {}) | os.environ | clone | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with log.open("w", errors="backslashreplace") as output:  # any name of a file
        print(*command, file=output, flush=True)
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=ROOT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with its ranks
                process.wait()
    if code == 0:
        return ""
    errors = [line.strip() for line in log.read_text().splitlines() if "Error" in line or "error:" in line]
    why = f"over its time limit of {limit:.0f} s" if code is None else f"exit status {code}"
    return f"{why}: {errors[-1][:200]} ({log})" if errors else f"{why} ({log})"


def judge(case: Case, steps: Steps, before: Mapping[str, Outcome]) -> tuple[str, str]:
    """Result and figure of a training that has ended."""
    losses = [step["loss"] for step in steps.values()]
    if not all(map(math.isfinite, losses)):
        return "FAIL", "a loss is not finite"
    if any(step["skipped"] for step in steps.values()):
        return "FAIL", "a step was skipped"
    if (mfu := _median(steps, "mfu")) is not None and mfu < case.mfu:
        return "FAIL", f"{mfu:.1%} of the device's peak, at least {case.mfu:.0%}"
    if case.memory is not None:
        last = [*steps.values()][-1]
        ratio = last["peak"] / last["predicted_peak"]
        passed = abs(ratio - 1) <= case.memory
        return ("pass" if passed else "FAIL"), f"peak is {ratio:.2f} x the prediction, at most {case.memory:.0%} off"
    if case.like is None:
        return ("pass" if losses[-1] < losses[0] else "FAIL"), f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
    like = before[case.like].steps
    both = sorted(steps.keys() & like.keys())
    if not both:
        return "no reference", f"'{case.like}' has no steps"
    apart = max(abs(steps[n]["loss"] - like[n]["loss"]) / abs(like[n]["loss"]) for n in both)
    if case.within:
        passed = apart <= case.within
        return ("pass" if passed else "FAIL"), f"{apart:.1e} from '{case.like}', at most {case.within:.0e}"
    same = all(steps[n][key] == like[n][key] for n in both for key in ("loss", "norm"))
    return ("pass", f"bits of '{case.like}'") if same else ("FAIL", f"not the bits of '{case.like}': {apart:.1e}")


def _median(steps: Steps, name: str) -> float | None:
    found = [step[name] for step in steps.values() if name in step]
    return statistics.median(found) if found else None


def speed(steps: Steps) -> str:
    """Tokens per second of the median step, and memory where it is known."""
    text = f"{_median(steps, 'tokens_per_second'):,.0f} tokens/s, {_median(steps, 'tflops'):.3g} TFLOP/s"
    text += "" if (mfu := _median(steps, "mfu")) is None else f", MFU {mfu:.1%}"
    last = [*steps.values()][-1]
    if "peak" in last:
        text += f"; peak {last['peak'] / GIB:.2f} GiB, predicted {last['predicted_peak'] / GIB:.2f}"
    return text


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table."""
    rows = [f"| {o.case} | {o.result} | {o.figure.replace('|', '/')} | {o.seconds:.1f} |" for o in outcomes]
    return "\n".join(["| case | result | figure | seconds |", "|---|---|---|---:|", *rows])


def _machine(device: str) -> str:
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if device == "cuda":
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        parts += [f"CUDA {torch.version.cuda}", f"{len(names)} GPU(s): {', '.join(sorted(set(names)))}"]
    return ", ".join([*parts, platform.machine()])
