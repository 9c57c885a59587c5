"""Run a case in processes of its own, and compare its numbers with one process's."""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from megapipe.distributed.layout import whole_name
from megapipe.errors import UserError
from megapipe.models.gpt import WORD_EMBEDDINGS
from megapipe.training.guards import ranks as guard
from tools.proofs.cover.choices import (
    BIAS_STEP,
    HALF,
    LR,
    STEPS,
    Case,
    num_layers,
    one_process,
    world_size,
)
from tools.proofs.cover.rank import BIASES, HISTORIES, Numbers, Part, run_rank

SECONDS = 240.0
"""How long a start of a case may take; alone on two cores it takes one to five seconds."""
TOLERANCE = {"float64": 1e-7, "float32": 1e-3}
"""Relative to the largest number of a tensor; what is summed in another order differs by rounding."""
MOMENTS = {"fp32": 0.0, "bf16": 1e-2}
"""The same where moments are kept in fewer bits: one that is rounded the other way moves its weight."""
ENDS = re.compile(r"(error:|\w*(\.\w+)*Error\b|AssertionError|megapipe:)")
"""How a line begins that says why a process ends."""
ROUNDED = {"fp16": 1e-2, "bf16": 0.1, "fp8": 0.1, "fp8-tensor": 0.1}
"""The tolerance of losses and norms in 16 and 8 bits, where a layout rounds other sums. In fp16 they differ by 1e-4."""
LARGEST = 0.25
"""The same of largest values of 8 bits, of inputs, weights and gradients each, relative to the largest.

Rounding made 0.17 at most in 17 cases.
"""
HALF_A_STEP = BIAS_STEP / 2
"""How far a router's bias may be off in float32: counts of tokens move it by whole steps, rounding by none."""
EXACT = ("skipped", "next scale")
"""Numbers of a step that are equal in every precision."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a case: "same", "differs", "hangs" or "crashes", and sentences that explain
    it.
    """

    result: str
    found: tuple[str, ...] = ()
    seconds: float = 0.0


def warm() -> None:
    """Do once, before any fork, what each process of a case would do again.

    A process that saves or loads imports the compiler for a second, and each digests the source of the package.
    """
    for name in ("torch._dynamo", "megapipe.checkpoint.shards", "numpy.random"):
        importlib.import_module(name)
    digest = guard._package()
    guard._package = lambda: digest
    gc.collect()
    gc.freeze()  # what is imported is shared with each fork, as long as no search for garbage writes to it


class Runs:
    """Starts of runs as forks of this process, and the numbers of one process, each model trained once.

    Args:
        folder: for checkpoints, logs and numbers.
        seconds: how long a start may take.
        references: folder of earlier runs, perhaps of another source. A case that is as their one process is not
            trained on one again; one that differs from it is.
    """

    def __init__(self, folder: Path, seconds: float, references: Path | None = None) -> None:
        self.folder = folder
        self.seconds = seconds
        self.references = references

    def judge(self, case: Case) -> Verdict:
        """Train a case, and compare it with one process."""
        begun = time.monotonic()
        name = name_of(case, num_layers(case))
        here = self.folder / name
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir(parents=True)
        try:
            found = self._compare(case, here)
            verdict = Verdict("differs" if found else "same", tuple(found[:6]))
            if not found:
                shutil.rmtree(here)
        except _Ended as error:
            verdict = Verdict(error.result, (error.text,))
        return Verdict(verdict.result, verdict.found, time.monotonic() - begun)

    def _compare(self, case: Case, here: Path) -> list[str]:
        alone, layers = one_process(case), num_layers(case)
        name = f"{'saved' if case['resumed'] == 'from-one' else 'alone'}-{name_of(alone, layers)}"
        mine = self.folder / name
        kept = self.references and self.references / name
        if kept is None or not (kept / "done").exists():
            kept = None
            self._alone(alone, layers, mine)
        parts = self._parts(case, here, (kept or mine) / "saved")
        found = self._differences(case, parts, kept or mine)
        if found and kept is not None:
            self._alone(alone, layers, mine)
            found = self._differences(case, parts, mine)
        return found

    def _differences(self, case: Case, parts: Sequence[tuple[str, list[Numbers]]], reference: Path) -> list[str]:
        whole: Numbers = torch.load(reference / "all-0", weights_only=False)
        return [line for when, ranks in parts for line in differences(case, ranks, whole, when)]

    def _parts(self, case: Case, here: Path, checkpoint: Path) -> list[tuple[str, list[Numbers]]]:
        """Train a case, in as many parts as it has; return when each was, and the numbers of its ranks."""
        layers = num_layers(case)
        match case["resumed"]:
            case "no":
                return [("", self.start(case, layers, [], here / "all"))]
            case "from-one":
                load = ["--load", str(checkpoint), "--ckpt-step", str(HALF)]
                return [("", self.start(case, layers, load, here / "second"))]
        save = ["--save", str(here / "saved"), "--save-interval", str(HALF), "--exit-interval", str(HALF)]
        first = self.start(case, layers, save, here / "first")
        later = one_process(case) if case["resumed"] == "into-one" else case
        second = self.start(later, layers, ["--load", str(here / "saved")], here / "second")
        return [("before it was saved: ", first), ("after it was loaded: ", second)]

    def _alone(self, case: Case, layers: int, here: Path) -> None:
        """Train a case on one process, once; its checkpoint of HALF the iterations is kept if the folder says so."""
        with _locked(here.with_suffix(".lock")):
            if not (here / "done").exists():
                shutil.rmtree(here, ignore_errors=True)
                here.mkdir(parents=True)
                save = ["--save", str(here / "saved"), "--save-interval", str(HALF)]
                self.start(case, layers, save if here.name.startswith("saved") else [], here / "all")
                (here / "done").touch()

    def start(self, case: Case, layers: int, more: Sequence[str], at: Path) -> list[Numbers]:
        """Run the processes of a case once and return what each of them knows at the end."""
        size = world_size(case)
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(size)}
        env |= {"LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        files = [at.with_name(f"{at.name}-{rank}") for rank in range(size)]
        children = {}
        for rank, file in enumerate(files):
            of_rank = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = file.with_suffix(".log")
            work = partial(run_rank, case, layers, more, file)
            children[_fork(work, of_rank, log)] = rank
        _wait(children, files, self.seconds)
        return [torch.load(file, weights_only=False) for file in files]


class _Ended(Exception):
    """A start that did not come to its end."""

    def __init__(self, result: str, text: str) -> None:
        super().__init__(text)
        self.result = result
        self.text = text


def name_of(case: Case, layers: int) -> str:
    """Return a name for the files of a case."""
    return sha256(" ".join([str(layers), *sorted(f"{k}={v}" for k, v in case.items())]).encode()).hexdigest()[:16]


def _fork(work: Callable[[], None], env: dict[str, str], log: Path) -> int:
    """Do some work in a process of its own, which prints to a file; return its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        output = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(env)
        work()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except UserError as error:
        print(f"error: {error}", flush=True)
        status = error.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _wait(children: dict[int, int], files: Sequence[Path], seconds: float) -> None:
    """Wait for the processes of a run, the first that fails or the end of the time.

    Raises: _Ended if one fails or does not end; all of them are killed then.
    """
    until = time.monotonic() + seconds
    left = dict(children)
    failed: tuple[int, int] | None = None
    while left and time.monotonic() < until:
        time.sleep(0.01)
        for child in list(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                rank = left.pop(child)
                code = os.waitstatus_to_exitcode(status)
                if code and failed is None:
                    failed = rank, code
                    until = min(until, time.monotonic() + 5)  # the others may say more
    for child in left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if failed is not None:
        rank, code = failed
        raise _Ended("crashes", f"rank {rank} ends with {code}: {_last_words(files[rank].with_suffix('.log'))}")
    if left:
        raise _Ended("hangs", f"ranks {sorted(left.values())} of {len(children)} do not end: {files[0].parent}")


def _last_words(log: Path) -> str:
    text = log.read_text(errors="replace")
    lines = text.strip().splitlines()
    found = [
        n for n, line in enumerate(lines) if re.match(r"(error:|\w*(\.\w+)*Error\b|AssertionError|megapipe:)", line)
    ]
    return "\n".join(lines[found[0] :][:8] if found else lines[-8:])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time in."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def differences(case: Case, ranks: Sequence[Numbers], whole: Numbers, when: str = "") -> list[str]:
    """Return the differences from one process, a line each."""
    found = [when + line for line in _copies(ranks)]
    for rank, mine in enumerate(ranks):
        where = f"{when}rank {rank}: "
        found += [where + line for line in _numbers(case, mine, whole)]
        at_the_end = max(mine.steps, default=0) == STEPS
        if at_the_end:
            found += [where + line for line in _tensors(case, mine, whole)]
    if not ranks[0].steps:
        found.append(f"{when}no iteration was trained")
    return found


def _copies(ranks: Sequence[Numbers]) -> Iterator[str]:
    """Yield a sentence for each tensor that is not bitwise equal on all ranks that have it, in any
    precision.
    """
    first: dict[tuple[str, str, str], tuple[int, Tensor]] = {}
    for rank, mine in enumerate(ranks):
        for kind, parts in mine.tensors.items():
            for name, (tensor, pieces) in parts.items():
                at, known = first.setdefault((kind, name, str(sorted(pieces.items()))), (rank, tensor))
                if not torch.equal(tensor.nan_to_num(), known.nan_to_num()):
                    off = (tensor.double() - known.double()).abs().max()
                    yield f"ranks {at} and {rank}: {kind} of {name} differ by {off:.3g} from each other"


def _numbers(case: Case, mine: Numbers, whole: Numbers) -> Iterator[str]:
    for n, step in mine.steps.items():
        wanted = whole.steps[n]
        if step.keys() != wanted.keys():
            yield f"iteration {n} reports {sorted(step)}, not {sorted(wanted)}"
        for name in step.keys() & wanted.keys():
            if not _near(case, step[name], wanted[name], exact=name in EXACT):
                yield f"iteration {n}: {name} {step[name]!r}, not {wanted[name]!r}"
    # A part of a run has the last evaluations, or the first ones.
    count = len(mine.evaluations)
    last = max(mine.steps, default=0) == STEPS
    wanted_losses = whole.evaluations[len(whole.evaluations) - count :] if last else whole.evaluations[:count]
    for n, (a, b) in enumerate(zip(mine.evaluations, wanted_losses, strict=False)):
        if a.keys() != b.keys() or not all(_near(case, a[name], b[name]) for name in a):
            yield f"evaluation {n}: {a}, not {b}"


def _near(case: Case, a: float, b: float, *, exact: bool = False) -> bool:
    if exact or not math.isfinite(a) or not math.isfinite(b):
        return a == b or (math.isnan(a) and math.isnan(b))
    allowed = max((TOLERANCE | ROUNDED)[case["precision"]], MOMENTS[case["moments"]])
    return abs(a - b) <= allowed * max(abs(b), 1e-3)


def _tensors(case: Case, mine: Numbers, whole: Numbers) -> Iterator[str]:
    for kind, parts in mine.tensors.items():
        if kind not in whole.tensors:
            yield f"keeps {kind}, which one process does not"
            continue
        for name, (tensor, pieces) in parts.items():
            wanted = _wanted(whole.tensors[kind], name).tensor
            for dim, (i, n) in pieces.items():
                wanted = wanted.chunk(n, dim)[i]
            if not _agree(case, kind, tensor.double(), wanted.double()):
                off = (tensor.double() - wanted.double()).abs().max()
                yield f"{kind} of {name} differ by {off:.3g} of {wanted.abs().max():.3g}"


def _wanted(parts: dict[str, Part], name: str) -> Part:
    # A tied head on a rank of its own has the embedding's gradient, the sum of both uses.
    return parts.get(whole_name(name)) or parts[WORD_EMBEDDINGS]


def _agree(case: Case, kind: str, a: Tensor, b: Tensor) -> bool:
    """Return whether a tensor is equal to one process's."""
    if kind == HISTORIES:
        return _largest_agree(case, a, b)
    allowed = TOLERANCE.get(case["precision"])
    if allowed is None:
        return True
    if kind == BIASES and case["precision"] != "float64":
        return bool((a - b).abs().max() < HALF_A_STEP)
    return _close(case, a, b, max(allowed, MOMENTS[case["moments"]]))


def _largest_agree(case: Case, a: Tensor, b: Tensor) -> bool:
    """Return whether largest values agree with one process's; [3, steps]: of inputs, weights and
    gradients.

    A replica divides the sum over its microbatches by their number. So its gradients are as many times as large as
    there are replicas, until they are averaged; unless one process has had the last step.
    """
    least = b.abs().amax(1) * LARGEST
    replicas = int(case["dp"]) if case["loss"] == "mean" else 1
    inputs_and_weights = ((a - b).abs().amax(1) <= least)[:2].all()
    gradients = any((a[2] / n - b[2]).abs().max() <= least[2] for n in {1, replicas})
    return bool(inputs_and_weights) and gradients


def _close(case: Case, a: Tensor, b: Tensor, allowed: float) -> bool:
    """Return whether two tensors agree: in float64 each element, else their norms.

    Adam makes a step of full size of a gradient that is nothing but rounding, in either direction.
    """
    if case["precision"] == "float64" and case["moments"] == "fp32":
        return bool((a - b).abs().max() <= allowed * max(float(b.abs().max()), 1e-6))
    # A bias of keys has no gradient but rounding: softmax does not see it. From 0 it goes as far as Adam's steps do.
    most = 2 * STEPS * LR
    if b.abs().max() <= most:
        return bool(a.abs().max() <= most)
    return bool((a - b).norm() <= allowed * float(b.norm()))
