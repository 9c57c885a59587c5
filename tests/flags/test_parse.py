"""Flags become a Config and come back; every wrong one is named in a line of its own."""

import importlib
import re
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megapipe.commands.main import command
from megapipe.config import Config
from megapipe.doors import DOORS, as_called
from megapipe.errors import ConfigError
from megapipe.flags.parse import flags_of, parse, parse_among, read, read_among, stop, to_flags
from megapipe.flags.table import table

ROOT = Path(__file__).parents[2]


def problems(*argv: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(Config, argv)
    return caught.value.problems


def test_no_flags_give_the_defaults():
    assert parse(Config, []) == Config()


def test_values_reach_their_fields():
    config = parse(Config, ["--num-layers", "12", "--lr", "3e-4", "--bf16", "--normalization", "RMSNorm"])
    assert (config.model.num_layers, config.optimizer.lr, config.precision.bf16) == (12, 3e-4, True)
    assert config.model.normalization == "RMSNorm"


def test_a_flag_given_twice_counts_the_second_time():
    assert parse(Config, ["--num-layers", "2", "--num-layers", "3"]).model.num_layers == 3


def test_values_with_spaces_equal_signs_and_dashes():
    config = parse(Config, ["--split", "969, 30, 1", "--lr=1e-3", "--min-lr", "-1", "--save=--odd_name"])
    assert (config.data.split, config.optimizer.lr) == ("969, 30, 1", 1e-3)
    assert (config.optimizer.min_lr, config.checkpoint.save) == (-1, "--odd_name")


def test_data_path_takes_many_values():
    assert parse(Config, ["--data-path", "0.3", "a", "0.7", "b", "--bf16"]).data.data_path == ("0.3", "a", "0.7", "b")


@pytest.mark.parametrize("name", ["--override-opt_param-scheduler", "--override-opt-param-scheduler"])
def test_megatrons_two_spellings_of_the_scheduler_switch(name):
    assert parse(Config, [name]).optimizer.override_opt_param_scheduler


def _other(kind, default):
    if kind is bool:
        return not default
    if choices := get_args(kind):
        if get_origin(kind) is tuple and get_origin(choices[0]) is Literal:
            return get_args(choices[0])[:2]
        several = {int: (3, 5), str: ("a b", "c"), float: (0.5, 2.0)}
        return several.get(choices[0], choices[-1])
    return {int: 7, float: -2.5e-05, str: "--dir/with space=x_y"}[kind]


def test_every_flag_survives_the_round_trip():
    sections = {}
    for flag in flags_of(Config).values():
        sections.setdefault(flag.section, {})[flag.field] = _other(flag.kind, flag.default)
    config = Config(**{name: replace(getattr(Config(), name), **values) for name, values in sections.items()})
    assert parse(Config, to_flags(config)) == config
    assert to_flags(Config()) == []


def test_every_flag_names_what_it_takes_at_a_wrong_value_and_at_none():
    choices = 0
    for flag in flags_of(Config).values():
        kind = get_args(flag.kind)[0] if flag.count == "many" else flag.kind
        if kind in (bool, str):
            continue
        (wrong,), (none,) = problems(flag.name, "x"), problems(flag.name)
        assert wrong.startswith(f"{flag.name} x: expected "), wrong
        assert none.startswith(f"{flag.name} needs a value: "), none
        if get_origin(kind) is Literal:
            choices += 1
            assert all(str(choice) in wrong and str(choice) in none for choice in get_args(kind))
    assert choices > 20


def test_a_tool_with_flags_of_its_own_answers_for_those_alone():
    @dataclass(frozen=True)
    class Flags:
        workers: int = 1
        """Processes."""

    assert parse(Flags, ["--workers", "3"]) == Flags(3)
    assert to_flags(Flags(3)) == ["--workers", "3"]
    with pytest.raises(ConfigError, match=r"^unknown flag --seed$"):
        parse(Flags, ["--seed", "3"])


def test_stop_prints_one_line_and_exits_with_2(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/some/where/pretrain_gpt.py"])
    with pytest.raises(SystemExit) as exited:
        stop(ConfigError("unknown flag --foo"))
    assert exited.value.code == 2
    assert capsys.readouterr().err == "pretrain_gpt.py: error: unknown flag --foo\n"


def test_under_torchrun_the_text_ends_its_report_and_stands_there_once(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py"])
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    failures = {}
    for rank in (0, 1):
        file = tmp_path / "attempt_0" / str(rank) / "error.json"
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        with pytest.raises(SystemExit):
            stop(ConfigError(["one", "another"]))
        failures[rank] = ProcessFailure(rank, pid=rank, exitcode=2, error_file=str(file))
    report = str(ChildFailedError("pretrain_gpt.py", failures))
    assert report.rstrip("=").endswith("pretrain_gpt.py: error: 2 problems\n    one\n    another\n")
    assert report.count("another") == 1
    assert capsys.readouterr().err == ""


@dataclass(frozen=True)
class Small:
    """What is small.

    The second paragraph of the class is a little longer than forty letters.
    """

    steps: tuple[int, ...] = (1, 2)
    """How many."""
    kind: Literal["a", "b"] | None = None
    """Which. Default: neither,
    and that on two lines."""
    quiet: bool = False
    """Say nothing."""


def help_of(cls, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.argv", ["small.py"])
    with pytest.raises(SystemExit) as exited:
        parse(cls, ["--help"])
    assert exited.value.code == 0
    return capsys.readouterr().out


def test_help_is_the_docstrings_of_the_class_and_its_fields(capsys, monkeypatch):
    expected = """\
usage: small.py [--flag value ...]

What is small.

The second paragraph of the class is a
little longer than forty letters.

  -h, --help
      Print this and end.
  --steps INT ...
      How many. (default: 1 2)
  --kind {a,b}
      Which. Default: neither, and that
      on two lines.
  --quiet
      Say nothing.
"""
    assert help_of(Small, 40, capsys, monkeypatch) == expected
    assert help_of(Small, 0, capsys, monkeypatch).count("\n") < expected.count("\n")  # no terminal: 80 columns


def test_a_class_and_a_field_without_docstrings_have_help(capsys, monkeypatch):
    bare = make_dataclass("Bare", [("steps", int, 3), ("out", Path, Path("a"))], frozen=True)  # nor has it a source
    expected = ["usage: small.py [--flag value ...]", "", "  -h, --help", "      Print this and end."]
    expected += ["  --steps INT", "      (default: 3)", "  --out FILE", "      (default: a)"]
    assert help_of(bare, 80, capsys, monkeypatch).splitlines() == expected


def test_help_of_a_run_tells_of_each_flag_what_the_docs_do(capsys, monkeypatch):
    printed = help_of(Config, 80, capsys, monkeypatch)
    assert [line for line in printed.splitlines() if len(line) > 80 and " " in line.strip()] == []
    told = " ".join(printed.split())
    assert " --unset NAME ... Forget these flags where they stand before this one." in told
    rows = re.findall(r"^\| `(--\S+)` \| (?:off|`.*`|) \| (.*) \|$", table(), re.M)
    assert {name for name, _ in rows} >= flags_of(Config).keys()
    assert [
        name for name, text in rows if not re.search(rf" {name} (\S+ )?(\.\.\. )?{re.escape(as_called(text))}", told)
    ] == []


def test_flags_of_a_tool_stand_among_those_of_a_run():
    tool, config = parse_among(Small, ["--steps", "3", "4", "--num-layers", "8", "--quiet", "--seed=5", "--kind=b"])
    assert tool == Small((3, 4), "b", True)
    assert (config.model.num_layers, config.batch.seed) == (8, 5)
    with pytest.raises(ConfigError) as caught:
        parse_among(Small, ["--kind", "c", "--num-layer", "8", "--seed", "x"])
    assert caught.value.problems == (
        "--kind c: expected a or b",
        "unknown flag --num-layer; did you mean --num-layers?",
        "--seed x: expected an integer",
    )


PROGRAMS = [path for room in ("tools/bench", "megapipe/commands") for path in (ROOT / room).rglob("*.py")]


def test_commands_read_their_flags_with_this_parser():
    """What it has not are subcommands."""
    others = {str(path.relative_to(ROOT)) for path in PROGRAMS if re.search("^import argparse", path.read_text(), re.M)}
    assert others == {"megapipe/commands/schedule_flags.py"}


@pytest.mark.parametrize("name", DOORS)
def test_the_help_of_each_command_tells_all_its_flags(name, capsys, monkeypatch):
    module = importlib.import_module(command(name).__module__)
    for flags in {vars(module).get("Flags"), vars(module).get("Options")} - {None}:  # schedules.py has its subcommands
        told = " ".join(help_of(flags, 80, capsys, monkeypatch).split())
        assert all(f" {flag} " in told for flag in flags_of(flags))


def test_what_can_be_read_is_read_next_to_what_cannot():
    line = "--num-layers 7 --hidden-size abc --swiglo --pipeline-model-parallel-size 2"
    found = read(Config, line.split())
    assert (found.value.model.num_layers, found.value.model.hidden_size) == (7, None)
    assert found.problems == ("unknown flag --swiglo; did you mean --swiglu?", "--hidden-size abc: expected an integer")
    said = ["--num-layers 7 does not fill 2 stages", "--hidden-size is missing", "--swiglu makes an MLP of width 0"]
    assert found.without_unread(said) == said[:1]


@pytest.mark.parametrize("kind", ["hybrid", "e4m3"])
def test_megatrons_former_switches_of_fp8_name_its_format(kind):
    assert parse(Config, [f"--fp8-{kind}"]) == parse(Config, ["--fp8-format", kind])


def test_a_misspelled_flag_of_a_tool_is_known_among_those_of_a_run():
    _, run = read_among(Small, ["--thickness", "1", "--quite"])
    assert run.problems == ("unknown flag --thickness", "unknown flag --quite; did you mean --quiet?")


def test_a_list_that_is_given_twice_is_replaced_and_the_user_reads_which():
    """As in Megatron-LM the last one counts; --data-path given twice looks like two parts of a blend."""
    config = parse(
        Config,
        ["--data-path", "a", "b", "--num-layers", "2", "--num-layers", "3", "--data-path", "c", "--data-path", "c"],
    )
    assert config.data.data_path == ("c",)
    assert config.noop_flags == (("--data-path a b", "given again: the last one counts"),)


def test_unset_takes_back_what_stands_before_it_and_nothing_behind():
    words = "--num-layers 4 --tp-comm-overlap --recompute-modules mlp moe --unset tp-comm-overlap recompute-modules"
    assert parse(Config, words.split()) == parse(Config, ["--num-layers", "4"])
    assert parse(Config, [*words.split(), "--tp-comm-overlap"]).model.tp_comm_overlap
    assert parse(Config, ["--lr=1", "--unset=lr"]) == Config()
    # An old name is taken back as it was typed.
    assert parse(Config, ["--fp8-e4m3", "--unset", "fp8-e4m3"]) == Config()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--activations-checkpoint-method uniform", "recompute-granularity"),
        ("--recompute-lgd", "recompute-modules"),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 2", "pipeline-schedule"),
        ("--override-opt-param-scheduler", "override-opt_param-scheduler"),
        ("--override-opt_param-scheduler", "override-opt-param-scheduler"),
    ],
)
def test_a_flag_is_taken_back_under_whichever_name_it_was_typed(words, name):
    """A page said --unset recompute-granularity, and a script's --activations-checkpoint-method stayed."""
    assert parse(Config, words.split()) != Config()
    found = parse(Config, [*words.split(), "--unset", name])
    assert (found, found.noop_flags) == (Config(), ())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--unset", "--unset needs names of flags without their dashes: --unset tp-comm-overlap"),
        ("--unset --lr 1", "--unset needs names"),
        (
            "--unset tp-com-overlap",
            "--unset tp-com-overlap: unknown flag --tp-com-overlap; did you mean --tp-comm-overlap?",
        ),
        ("--unset --unset lr", "--unset needs names"),
        ("--unset memory-gib", "--unset memory-gib: only flags of a run can be taken back. Leave --memory-gib out."),
    ],
)
def test_unset_without_a_flag_that_is_known_is_refused(words, says):
    with pytest.raises(ConfigError) as refused:
        parse(Config, words.split())
    assert says in str(refused.value)
