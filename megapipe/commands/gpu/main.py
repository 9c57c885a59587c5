"""Check whether everything works on the GPUs of this machine.

megapipe gpu-check --output gpu-check

Each case of cases.py is a process with a time limit, so that a failure costs one line of the table.
A second GPU adds the cases over NCCL. The command needs no network and no package but megapipe's
own. Exit status 0 if all cases pass.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from megapipe.commands.gpu.cases import CASES, SHAPE, SIZES, Case
from megapipe.commands.gpu.steps import Steps, median, speed, step_of
from megapipe.data.files import folder_problems, write_complete
from megapipe.doors import ROOT, in_clone
from megapipe.errors import ConfigError, UserError
from megapipe.flags.parse import parse

_EMULATED = 8
"""The number of emulated GPUs."""


@dataclass(frozen=True)
class Flags:
    """Check whether everything works on the GPUs of this machine, with small trainings.

    A case is one training or script. --only selects cases by patterns of their names. The cases run
    one after another within --minutes.
    """

    device: Literal["cuda", "cpu"] = "cuda"
    """cuda, or cpu to try the command itself with tiny sizes."""
    emulated: bool = False
    """Run the trainings with tiny sizes on GPUs that a CPU emulates, whose streams and NCCL are
    checked. It needs a clone and a C++ compiler, and shows nothing of speed or memory."""
    minutes: float = 20.0
    """Time for all cases. A case that does not start in time counts as failed."""
    ranks: int | None = None
    """Largest number of processes of a case. (default: the number of GPUs, 2 on a CPU)"""
    nanogpt: str | None = None
    """Folder of nanoGPT to compare with, from git clone https://github.com/karpathy/nanoGPT"""
    output: str = "gpu-check"
    """Folder for report.md, report.json, rates.json (for --rates of megapipe plan), and the output
    of each case. It replaces files."""
    only: tuple[str, ...] = ("*",)
    """Patterns of case names. The references of these cases run too."""


@dataclass(frozen=True)
class Outcome:
    """The result of a case: a row of the report.

    Attributes:
        case: the name of the case.
        result: pass, FAIL, or why there is no verdict.
        figure: the measured numbers, in words.
        seconds: the time that the case took.
        steps: the numbers of each iteration of a training, such as its loss.
    """

    case: str
    result: str
    figure: str
    seconds: float = 0.0
    steps: Steps = field(default_factory=dict, repr=False)


def main(argv: Sequence[str]) -> None:
    """Run the cases and write the table. Exit with status 0 if all pass."""
    flags = parse(Flags, argv)
    if flags.emulated and not in_clone():
        raise ConfigError(
            "--emulated needs a clone of megapipe, whose tools/proofs/gpu has the devices. "
            "Run the command in a clone, or leave out --emulated."
        )
    if flags.device == "cuda" and not (flags.emulated or torch.cuda.is_available()):
        raise UserError(
            f"--device cuda: torch {torch.__version__} finds no GPU. "
            "Add --device cpu to try the command without one."
        )
    if flags.nanogpt is not None and not in_clone():
        raise ConfigError(
            "--nanogpt needs a clone of megapipe, whose tools/bench has the comparison. "
            "Run the command in a clone, or leave out --nanogpt."
        )
    if flags.ranks is not None and flags.ranks < 1:
        raise ConfigError(f"--ranks must be at least 1, got {flags.ranks}. Give --ranks 1.")
    problems = list(folder_problems({"--output": flags.output}))
    if not flags.minutes > 0:
        problems.append(f"--minutes {flags.minutes:g} must be above 0")
    for pattern in flags.only:
        if not any(fnmatch(case.name, pattern) for case in CASES):
            names = ", ".join(case.name for case in CASES)
            problems.append(f"--only {pattern} is none of the cases: {names}")
    if problems:
        raise ConfigError(problems)
    cases = chosen(flags)
    if not cases:
        here = ", ".join(case.name for case in chosen(replace(flags, only=("*",)))) or "none"
        raise ConfigError(
            f"--only {' '.join(flags.only)}: none of these cases runs on this machine. "
            f"These do: {here}"
        )
    folder = Path(flags.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # Checkpoints of an earlier call would be loaded in place of this one's.
    shutil.rmtree(folder / "saved", ignore_errors=True)
    machine = _machine(flags.device)
    print(machine, flush=True)
    if flags.emulated:
        left = [case.name for case in CASES if "cuda" in case.devices and not case.emulates]
        print(f"emulated GPUs: {len(left)} cases need a real one: {', '.join(left)}", flush=True)
    outcomes = _run_all(cases, flags, folder)
    rows = [asdict(o) for o in outcomes]
    (folder / "report.json").write_text(json.dumps({"machine": machine, "cases": rows}, indent=1))
    write_complete(folder / "report.md", f"{machine}\n\n{markdown(outcomes)}\n")
    # A case without a verdict, for lack of time or of a reference, counts as failed.
    failed = sum(o.result != "pass" for o in outcomes)
    print(f"{len(outcomes) - failed} of {len(outcomes)} pass; {folder / 'report.md'}")
    raise SystemExit(failed > 0)


def chosen(flags: Flags) -> list[Case]:
    """Return the cases that --only names and that can run here, and their references.

    A case whose losses are compared with another case's comes after that one.
    """
    here = [case for case in CASES if _can_run(case, flags)]
    wanted = set()
    for pattern in flags.only:
        wanted |= {case.name for case in here if fnmatch(case.name, pattern)}
    # A reference stands before its cases in the list, and may have a reference itself.
    for case in reversed(here):
        if case.name in wanted and case.like:
            wanted.add(case.like)
    return [case for case in here if case.name in wanted]


def _can_run(case: Case, flags: Flags) -> bool:
    """Return whether this machine, its packages and the flags allow the case."""
    ranks = flags.ranks
    if flags.emulated and not case.emulates:
        return False
    if ranks is None and flags.emulated:
        ranks = _EMULATED
    elif ranks is None and flags.device == "cuda":
        ranks = torch.cuda.device_count()
    elif ranks is None:
        ranks = 2
    if flags.device not in case.devices or case.ranks > ranks:
        return False
    if case.needs is None:
        return True
    if case.needs == "nanogpt":
        return flags.nanogpt is not None
    # Only a clone has the tests that pytest would run.
    if case.needs == "pytest" and not in_clone():
        return False
    return find_spec(case.needs) is not None


def _run_all(cases: Sequence[Case], flags: Flags, folder: Path) -> list[Outcome]:
    """Run the cases one after another, as long as --minutes last, and print a line for each."""
    until = time.monotonic() + 60 * flags.minutes
    outcomes: dict[str, Outcome] = {}
    width = max((len(case.name) for case in cases), default=0)
    for case in cases:
        # The result of a case that is not started.
        began = time.monotonic()
        result = "no time left"
        figure = f"--minutes {flags.minutes:g} were over"
        steps = Steps()
        if (left := until - began) > 0:
            limit = case.seconds * (4 if flags.emulated else 1)
            result, figure, steps = _run(case, flags, folder, min(left, limit), outcomes)
        took = time.monotonic() - began
        outcomes[case.name] = Outcome(case.name, result, figure, took, steps)
        print(f"{case.name:{width}}  {result:5}  {took:5.1f} s  {figure}", flush=True)
    return [*outcomes.values()]


def _run(
    case: Case, flags: Flags, folder: Path, limit: float, before: Mapping[str, Outcome]
) -> tuple[str, str, Steps]:
    """Run a case in a process of its own.

    Args:
        folder: the folder for the case's output.
        limit: seconds after which the case fails.
        before: the outcomes of earlier cases, by name.
    Returns: (result, figure, steps), fields of an `Outcome`.
    """
    place = folder / "".join(c if c.isalnum() else "-" for c in case.name)
    # Lines of an earlier call would be read as this one's steps.
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    log = place / "output.txt"
    file = place / "steps.jsonl"
    # Two threads of torch wait for each other in every product. While two other programs used the
    # two cores, the case of every schedule took 180 s instead of 3.
    threads = {"OMP_NUM_THREADS": "1"} if flags.device == "cpu" or flags.emulated else {}
    problem = _process(_command(case, flags, folder, file), log, limit, threads)
    # A script judges itself, and its last line is its figure.
    if case.script:
        last = log.read_text().strip().splitlines()[-1]
        if problem:
            return "FAIL", f"{last}; {problem}", {}
        return "pass", last, {}
    lines: list[str] = []
    # A training that fails at its start writes no file.
    if file.exists():
        lines = file.read_text().splitlines()
    steps = {step["iteration"]: step for step in map(step_of, lines)}
    if problem or not steps:
        return "FAIL", problem or "no steps", steps
    result, figure = judge(case, steps, before)
    return result, f"{figure}; {speed(steps)}", steps


def _command(case: Case, flags: Flags, folder: Path, file: Path) -> list[str]:
    """Return the command line of a case.

    Args:
        folder: replaces {folder} in the flags of the case.
        file: the value of --metrics-file, for a training.
    """
    if case.script:
        known = {
            "device": flags.device,
            "nanogpt": str(Path(flags.nanogpt or "").resolve()),
            "folder": str(folder),
        }
        return [sys.executable, *(part.format_map(known) for part in case.script.split())]
    size = "cpu" if flags.emulated else flags.device
    run = f"{SHAPE} {SIZES[size]} {case.flags}".split()
    if flags.device == "cpu":
        run += ["--distributed-backend", "gloo"]
    run += ["--metrics-file", str(file)]
    command = [sys.executable]
    ranks = str(case.ranks)
    if flags.emulated:
        # One process imports torch, and forks the ranks.
        command += ["-m", "tools.proofs.gpu.emulated.launch", "--ranks", ranks, "--"]
    else:
        if case.ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        command += ["-m", "megapipe", "pretrain"]
    return [*command, *(part.format(folder=folder) for part in run)]


def _process(
    command: Sequence[str], log: Path, limit: float, default: Mapping[str, str] | None = None
) -> str:
    """Run a command for at most `limit` seconds, with its output in `log`.

    Args:
        default: variables for the environment, unless they are set already; None for none.
    Returns: why the command failed; "" if it did not.
    """
    clone = {"PYTHONPATH": str(ROOT)} if in_clone() else {}
    # --deterministic-mode needs cuBLAS to have a workspace of a fixed size.
    env = dict(default or {}) | os.environ | clone | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    # The command may name a file whose name is no valid UTF-8.
    with log.open("w", errors="backslashreplace") as output:
        print(*command, file=output, flush=True)
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # The ranks are in the session of their launcher, and end with it.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code == 0:
        return ""
    why = f"exit status {code}"
    if code is None:
        why = f"over its time limit of {limit:.0f} s"
    # A traceback ends with the error. Of several ranks the last one that failed is shown.
    lines = log.read_text().splitlines()
    errors = [line.strip() for line in lines if "Error" in line or "error:" in line]
    if errors:
        why += f": {errors[-1][:200]}"
    return f"{why} ({log})"


def judge(case: Case, steps: Steps, before: Mapping[str, Outcome]) -> tuple[str, str]:
    """Return (result, figure) for the `Outcome` of a training that has ended.

    Args:
        case: the training.
        steps: the numbers of its iterations.
        before: the outcomes of earlier cases, by name; the reference is among them.
    """
    # Mistakes of any training come first.
    losses = [step["loss"] for step in steps.values()]
    if not all(map(math.isfinite, losses)):
        return "FAIL", "a loss is not finite"
    if any(step["skipped"] for step in steps.values()):
        return "FAIL", "a step was skipped"
    if (mfu := median(steps, "mfu")) is not None and mfu < case.mfu:
        return "FAIL", f"{mfu:.1%} of the device's peak, at least {case.mfu:.0%}"
    # Then each case has one criterion: memory, a falling loss, or a reference.
    if case.memory is not None:
        last = [*steps.values()][-1]
        ratio = last["peak"] / last["predicted_peak"]
        figure = f"peak is {ratio:.2f} x the prediction, at most {case.memory:.0%} off"
        return _result(abs(ratio - 1) <= case.memory), figure
    if case.like is None:
        figure = f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        return _result(losses[-1] < losses[0]), figure
    like = before[case.like].steps
    # A resumed training has only the last steps.
    both = sorted(steps.keys() & like.keys())
    if not both:
        return "no reference", f"'{case.like}' has no steps"
    error = max(abs(steps[n]["loss"] - like[n]["loss"]) / abs(like[n]["loss"]) for n in both)
    if case.within:
        figure = f"{error:.1e} from '{case.like}', at most {case.within:.0e}"
        return _result(error <= case.within), figure
    if all(steps[n][key] == like[n][key] for n in both for key in ("loss", "norm")):
        return "pass", f"bitwise equal to '{case.like}'"
    return "FAIL", f"not bitwise equal to '{case.like}': {error:.1e}"


def _result(passed: bool) -> str:
    """Return the word of the table: pass or FAIL."""
    return "pass" if passed else "FAIL"


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the table of all cases in Markdown."""
    lines = ["| case | result | figure | seconds |", "|---|---|---|---:|"]
    for one in outcomes:
        # A bar would end the cell.
        figure = one.figure.replace("|", "/")
        lines.append(f"| {one.case} | {one.result} | {figure} | {one.seconds:.1f} |")
    return "\n".join(lines)


def _machine(device: str) -> str:
    """Return the versions of Python, torch and CUDA, and the names of the GPUs, in a line."""
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if device == "cuda":
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        parts.append(f"CUDA {torch.version.cuda}")
        parts.append(f"{len(names)} GPU(s): {', '.join(sorted(set(names)))}")
    return ", ".join([*parts, platform.machine()])
