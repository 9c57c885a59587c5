"""No flag of the first class parses and does nothing: the package reads it, and a test tries it."""

from __future__ import annotations

import ast
import gzip
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from short_run import config as short_config
from short_run import run_of
from tiny import STYLES

from megapipe.config import Config, LogConfig
from megapipe.distributed.layout import Layout
from megapipe.distributed.mesh import ProcessMesh
from megapipe.flags.parse import flags_of, parse
from megapipe.optim.lr import LRSchedule, learning_rate
from megapipe.optim.rule import Part
from megapipe.optim.rules import find_rule
from megapipe.training.report.profile import Profiler, trace_path

ROOT = Path(__file__).parents[2]
SIZES = "--micro-batch-size 2 --global-batch-size 4 --seq-length 8"


def rate(config: Config) -> list[float]:
    """The learning rate along 100 steps."""
    return [learning_rate(LRSchedule.of(config), samples) for samples in range(0, 400, 4)]


def updated(config: Config) -> list[float]:
    """A matrix of query, key and value after two updates by different gradients."""
    value, grad = torch.eye(4, 6), torch.linspace(-1, 1, 24).view(4, 6)
    rule = find_rule(config.optimizer)
    state = {name: torch.zeros(4, 6) for name in rule.state}
    part = Part(("linear_qkv.weight",), value, grad, state, 0.1, 0.0, Layout((4, 6), fused=(2, 1, 1)))
    for step in range(2):
        rule.update([part], step)
        grad.copy_(grad.roll(1))
    return value.flatten().tolist()


EFFECTS: list[tuple[str, str, Callable[[Config], Any]]] = [
    ("--lr 1 --train-iters 100 --lr-warmup-iters 5", "--lr-warmup-init 0.1", rate),
    ("--lr 1 --train-iters 100 --lr-decay-style WSD --lr-wsd-decay-iters 50", "--lr-wsd-decay-style cosine", rate),
    (
        "--lr 1 --train-samples 400 --lr-decay-style WSD --lr-wsd-decay-samples 80",
        "--lr-wsd-decay-samples 200",
        rate,
    ),
    ("", "--adam-eps 1.0", updated),
    ("", "--adam-beta1 0.5", updated),
    ("", "--adam-beta2 0.5", updated),
    ("--optimizer sgd", "--sgd-momentum 0.5", updated),
    ("--optimizer muon", "--muon-momentum 0.5", updated),
    ("--optimizer muon", "--muon-num-ns-steps 1", updated),
    ("--optimizer muon", "--muon-extra-scale-factor 0.2", updated),
    ("--optimizer muon", "--muon-no-split-qkv", updated),
    ("--optimizer muon", "--muon-nesterov", updated),
    ("--optimizer muon", "--muon-coefficient-type simple", updated),
    ("--optimizer muon", "--muon-scale-mode shape_scaling", updated),
]
"""What both runs have, what one of them has, and what differs."""


@pytest.mark.parametrize("base, flag, effect", EFFECTS, ids=[flag for _, flag, _ in EFFECTS])
def test_the_flag_changes_what_it_names(base, flag, effect):
    without, given = (parse(Config, f"{SIZES} {base} {more}".split()) for more in ("", flag))
    assert effect(without) != effect(given)


def test_flags_of_the_log_change_the_line_and_the_board(tmp_path, capsys, monkeypatch):
    """Of two steps, one with each flag and one with none."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # a third of a second

    shown = {}
    switches = "log_throughput log_params_norm log_world_size_to_tensorboard log_memory_to_tensorboard"
    memory = {"mem-reserved-bytes": 5}
    # A CPU has none to report.
    monkeypatch.setattr("megapipe.training.report.numbers.memory_bytes", lambda device: memory)
    for flags in ({}, dict.fromkeys(switches.split(), True)):
        folder = tmp_path / str(len(flags))
        log = LogConfig(tensorboard_dir=str(folder), tensorboard_log_interval=2, log_interval=1, **flags)
        training = run_of(ProcessMesh.single(), replace(short_config(STYLES["gpt2"]), log=log))
        for _ in range(2):
            training.driver.ended(training.driver.whole())
        training.run.report.close()
        events = EventAccumulator(str(folder)).Reload()
        assert [e.step for e in events.Scalars("lm loss")] == [2], "--tensorboard-log-interval 2"
        text = capsys.readouterr().out
        shown[len(flags)] = {*events.Tags()["scalars"]} | {*re.findall(r"\| ([a-zA-Z /()]+): ", text)}
    more = {"throughput per GPU (TFLOP/s/GPU)", "params norm", "params-norm", "world-size", "throughput", *memory}
    assert more <= shown[4] - shown[0]


def test_a_profile_says_where_it_is_and_replaces_no_earlier_one(tmp_path, capfd):
    log = LogConfig(profile=True, use_pytorch_profiler=True, profile_ranks=(1,), tensorboard_dir=f"{tmp_path}/tb")
    for run in range(3):
        profiler = Profiler(replace(log, profile_step_start=3, profile_step_end=5), 1)
        profiler.before(3)
        with torch.profiler.record_function(f"run {run}"):
            torch.ones(2)
        profiler.after(4)
        profiler.after(5)
        path, moved = trace_path(log, 1), f"; the one that was there is now earlier-{run}-rank-1.json.gz"
        # What the profiler's own library prints is a matter of its process: see test_launch.py.
        assert capfd.readouterr().out == f"trace of iterations 4 to 5 of rank 1: {path}{moved if run else ''}\n"
    names = ("earlier-1-rank-1", "earlier-2-rank-1", "rank-1")
    for run, name in enumerate(names):
        assert f'"run {run}"' in gzip.decompress(path.with_name(f"{name}.json.gz").read_bytes()).decode()
    assert len(list(path.parent.iterdir())) == 3


def test_a_profile_has_the_ranks_that_are_named_and_what_is_asked_for(tmp_path):
    for field, key in (
        ("pytorch_profiler_collect_shapes", "Input Dims"),
        ("pytorch_profiler_collect_callstack", "py("),
    ):
        log = LogConfig(profile=True, use_pytorch_profiler=True, profile_ranks=(1,), tensorboard_dir=f"{tmp_path}/tb")
        for given in (False, True):
            for rank in range(2):
                profiler = Profiler(replace(log, **{field: given}), rank)
                profiler.before(log.profile_step_start)
                torch.ones(2, 3).sum()
                profiler.after(log.profile_step_end)
            assert [trace_path(log, rank).exists() for rank in range(2)] == [False, True]
            assert (key in gzip.decompress(trace_path(log, 1).read_bytes()).decode()) == given, field


SECTIONS = {flag.section for flag in flags_of(Config).values()}
BY_PART = {"valid_data_path", "test_data_path"}
"""Fields that data.sources reads by the name of a part."""
PERMITS = {"use_precision_aware_optimizer"}
"""Fields that only checks read: without them others are refused."""


def test_the_package_reads_every_flag_off_its_section():
    """Outside of what parses, checks and describes it."""
    read = PERMITS | BY_PART
    for path in (ROOT / "megapipe").rglob("*.py"):
        if path.parent.name not in ("flags", "checks"):
            read |= reads(path)
    assert [name for name, flag in flags_of(Config).items() if flag.field not in read] == []


def test_every_flag_is_tried_by_a_test_of_what_it_does():
    files = [p for p in (ROOT / "tests").rglob("*.py") if p.parent.name not in ("flags", "checks")]
    tried = set().union(*map(tries, [*files, Path(__file__)]))
    assert [name for name, flag in flags_of(Config).items() if not {name, flag.field} & tried] == []


class _WithoutLambdas(ast.NodeTransformer):
    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        return ast.Constant(None)


def reads(path: Path) -> set[str]:
    """Attributes of a section of the configuration: of `config.batch`, of a name for it, or of a parameter of its type;
    inside of a section of itself; a note that says when a field is idle does not read."""
    tree = ast.parse(path.read_text())
    in_config = path.is_relative_to(ROOT / "megapipe" / "config")
    if in_config:
        _WithoutLambdas().visit(tree)
    owners = SECTIONS | {f"_{name}" for name in SECTIONS} | ({"self"} if in_config else set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                owners |= {name for name, value in bound(target, node.value) if last(value) in SECTIONS}
        elif isinstance(node, ast.NamedExpr) and last(node.value) in SECTIONS:
            owners.add(node.target.id)
        elif (
            isinstance(node, ast.arg | ast.AnnAssign)
            and node.annotation is not None
            and re.fullmatch(r"\w+Config( \| None)?", ast.unparse(node.annotation))
        ):
            owners.add(node.arg if isinstance(node, ast.arg) else last(node.target))
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and last(node.value) in owners}


def bound(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Names that an assignment gives, with what they stand for."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each, its in zip(target.elts, value.elts, strict=True):
            yield from bound(each, its)
    elif isinstance(target, ast.Name):
        yield target.id, value


def last(node: ast.AST) -> str:
    """`c` of a.b.c."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def tries(path: Path) -> set[str]:
    """Flags in texts, fields that a call makes a configuration of, and texts that are names of fields and no more."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and re.search("config$|^replace$|^with_fields$|^dict$", last(node.func).lower()):
            found |= {keyword.arg for keyword in node.keywords if keyword.arg}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value, *re.findall(r"--[\w-]+", node.value)}
            found |= set(node.value.split()) if re.fullmatch(r"[a-z_]+( [a-z_]+)*", node.value) else set()
    return found
