"""Our flags beside Megatron-LM's own parser, as tools/proofs/megatron_parser.py wrote down what it accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from megapipe.config import Config
from megapipe.flags.differences import DIFFERENCES
from megapipe.flags.megatron_flags import MEGATRON_FLAGS
from megapipe.flags.noop_flags import MANY, NOOP_FLAGS, OLD_FLAGS
from megapipe.flags.old_names import OLD_NAMES
from megapipe.flags.parse import Flag, flags_of
from megapipe.flags.rules import value_problem

ROWS = json.loads((Path(__file__).parent / "megatron_parser.json").read_text())["arguments"]
THEIRS: dict[str, dict[str, Any]] = {name: row for row in ROWS for name in row["names"]}
OURS = {name: flag for name, flag in flags_of(Config).items() if name in THEIRS}


def kind_of(flag: Flag) -> Any:
    return get_args(flag.kind)[0] if flag.count == "many" else flag.kind


def differences(flag: Flag) -> dict[str, str]:
    """What of a flag is not as there -> how it is there."""
    theirs, kind, found = THEIRS[flag.name], kind_of(flag), {}
    if {"none": 0, "one": 1, "many": "many"}[flag.count] != theirs["values"]:
        found["values"] = str(theirs["values"])
    default = theirs.get("default")
    # their switches say the field that they set, ours whether they are given
    if flag.count != "none" and (list(flag.default) if flag.count == "many" else flag.default) not in (
        [default, default or []] if flag.count == "many" else [default]
    ):
        found["default"] = str(default)
    choices = theirs.get("choices")
    if choices and not set(get_args(kind) if get_origin(kind) is Literal else [kind]) <= set(choices):
        found["choices"] = ", ".join(map(str, choices))
    return found


def test_every_default_arity_and_choice_is_megatrons_or_a_difference_that_the_page_shows():
    found = {(name, what, there) for name, flag in OURS.items() for what, there in differences(flag).items()}
    assert found == {row[:3] for row in DIFFERENCES}
    assert len(OURS) > 195


def test_what_megatron_reads_as_a_number_is_one_here():
    wider = {"int": {int, float}, "float": {float}, "str": {str}}
    for name, flag in OURS.items():
        kind, theirs = kind_of(flag), THEIRS[name].get("type")
        kind = type(get_args(kind)[0]) if get_origin(kind) is Literal else kind
        assert flag.count == "none" or theirs is None or kind in wider[theirs], name


def test_its_own_default_is_never_refused_where_it_is_written_out():
    for name, flag in OURS.items():
        default = THEIRS[name].get("default")
        if flag.count == "one" and default is not None:
            assert flag.value_problem([str(default)]) is None, name
    for name in NOOP_FLAGS.keys() & THEIRS.keys():
        default = THEIRS[name].get("default")
        if NOOP_FLAGS[name].values and default not in (None, []):
            assert value_problem(name, [str(default)]) is None, name


def test_a_flag_that_holds_takes_the_values_that_it_takes_there():
    for name, (values, _) in NOOP_FLAGS.items():
        if name in OLD_FLAGS or name not in THEIRS:
            continue
        theirs = THEIRS[name]
        assert (0 if not values else "many" if MANY in values else 1) == theirs["values"], name
        if choices := theirs.get("choices"):
            assert set(values) <= {str(choice) for choice in choices}, name
        elif theirs.get("type") in ("int", "float"):
            assert "*" not in values, name


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--train-sync-interval x", "--train-sync-interval x: expected an integer"),
        (
            "--hierarchical-context-parallel-sizes 2 y z",
            "--hierarchical-context-parallel-sizes y z: expected an integer",
        ),
        (
            "--sharp-enabled-group all",
            "--sharp-enabled-group all: only dp, dp_replica is implemented (NCCL has its defaults)",
        ),
        ("--dump-param-to-param-group-map", "--dump-param-to-param-group-map takes one value, got none"),
        ("--dump-param-to-param-group-map map.json", None),
        ("--train-sync-interval -1", None),
    ],
)
def test_a_value_that_megatron_would_not_take_is_one_line(flag, line):
    name, *values = flag.split()
    assert value_problem(name, values) == line


def test_the_names_that_we_know_are_all_that_it_accepts():
    assert set(THEIRS) == MEGATRON_FLAGS
    for old, means in OLD_NAMES.items():
        assert old not in THEIRS or ("VALUE" in str(means)) == THEIRS[old]["values"]
