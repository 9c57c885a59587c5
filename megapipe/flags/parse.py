"""Flags to configuration and back.

Megatron takes each name as it is spelled, and a user with three wrong flags wants to read three lines.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar, cast

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.flag import Flag as Flag
from megapipe.flags.flag import flags_of as flags_of
from megapipe.flags.fork import PADDING, SWITCHES, chosen, uneven
from megapipe.flags.help import help_text
from megapipe.flags.holds import HOLDS
from megapipe.flags.rules import KNOWN, refusal, value_problem
from megapipe.flags.stop import program, say
from megapipe.flags.stop import run as run
from megapipe.flags.stop import stop as stop
from megapipe.schedule import SCHEDULES

T = TypeVar("T")
_VALUE = ["VALUE"]
OLD_NAMES: Mapping[str, Mapping[str, list[str]]] = {
    "--layernorm-epsilon": {"--norm-epsilon": _VALUE},
    "--activations-checkpoint-method": {"--recompute-granularity": ["full"], "--recompute-method": _VALUE},
    "--use-rotary-position-embeddings": {"--position-embedding-type": ["rope"]},
    "--recompute-lgd": {"--recompute-granularity": ["selective"], "--recompute-modules": ["layernorm", "mlp"]},
    "--moe-layer-recompute": {"--recompute-granularity": ["selective"], "--recompute-modules": ["moe"]},
    "--disable-fp8-wgrad": {"--no-fp8-wgrad": []},
    "--enable-cuda-graph": {"--cuda-graph-impl": ["local"]},
    "--external-cuda-graph": {"--cuda-graph-impl": ["transformer_engine"]},
    "--disable-manual-gc-eval": {"--no-manual-gc-eval": []},
    "--enable-vocab-parallel": {"--vocab-parallel-pipeline": []},
}
"""A name -> the flags and values that it means; VALUE is its own. The first two are of 2023 and before. The fork for
zero bubble computes norms, GELU and dropout again; then five of Megatron-LM's own; the last is the vocabulary-parallel
fork's."""

_FLAG = re.compile(r"--|-[A-Za-z]")
_SEVERAL = {"--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"}
_UNQUOTED = "--step-batch-size-schedule"


def parse(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """Read flags into a configuration; a flag given twice counts the second time. `--help` prints and exits.

    Args:
        cls: a dataclass whose fields are flags, or one of such dataclasses. With `Config` also Megatron's other flags
            are known and answered.
        argv: flags and values; default sys.argv[1:].
    Raises: ConfigError with every unknown flag and unreadable value. `stop` prints it as argparse would.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    flags = flags_of(cls)
    if _asks_for_help(argv, flags):
        say(help_text(cls, flags, program(), shutil.get_terminal_size().columns))
        sys.exit(0)
    given, others, problems = _split(argv, flags)
    holding: dict[str, str] = {}
    if issubclass(cls, Config):
        problems += _old_names(given, others)
        problems += _schedule_switches(given, others, holding)
        holding |= {" ".join((name, *values)): HOLDS[name].because for name, values in others if name in HOLDS}
    known = KNOWN if issubclass(cls, Config) else frozenset()
    problems += [line for name, values in others if (line := _other(name, values, flags, known))]
    problems += [line for name, values in given.items() if (line := flags[name].count_problem(values))]
    problems += [line for name, values in given.items() if (line := flags[name].value_problem(values))]
    if problems:
        raise ConfigError(problems)
    sections: dict[str, dict[str, Any]] = {"": {"holding": tuple(holding.items())} if holding else {}}
    for name, values in given.items():
        sections.setdefault(flags[name].section, {})[flags[name].field] = flags[name].read(values)
    parsed: Any = cls()
    top = sections.pop("") | {name: dataclasses.replace(getattr(parsed, name), **to) for name, to in sections.items()}
    return cast(T, dataclasses.replace(parsed, **top))


def parse_among(own: type[T], argv: Sequence[str]) -> tuple[T, Config]:
    """Flags of a tool that stand among those of a run; `--help` is the tool's.

    Raises: ConfigError with the problems of both.
    """
    tool, config, problems = own(), Config(), list[str]()
    of_tool, of_run = split_among(own, argv)
    try:
        tool = parse(own, of_tool)
    except ConfigError as error:
        problems += error.problems
    try:
        config = parse(Config, of_run)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return tool, config


def split_among(own: type, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tokens of a tool's flags and of all others, each with the values behind it."""
    names = {*flags_of(own), "--help", "-h"}
    tokens: dict[bool, list[str]] = {True: [], False: []}
    of_tool = False
    for token in argv:
        if _FLAG.match(token):
            of_tool = token.partition("=")[0] in names
        tokens[of_tool].append(token)
    return tokens[True], tokens[False]


def place_of_dashes(argv: Sequence[str], example: str) -> int:
    """Return where the `--` stands that ends a tool's own flags, or the end where help is asked for.

    Raises: ConfigError with the example where there is none.
    """
    if "--" in argv:
        return argv.index("--")
    if not {"--help", "-h"} & {*argv}:
        raise ConfigError(f"what is to run is given after --, as in {example}")
    return len(argv)


def to_flags(config: object) -> list[str]:
    """The flags that differ from the defaults, such that parse(type(config), to_flags(config)) == config."""
    tokens: list[str] = []
    for flag in flags_of(type(config)).values():
        value = getattr(getattr(config, flag.section) if flag.section else config, flag.field)
        if value != flag.default:
            values = value if flag.count == "many" else () if flag.count == "none" else (value,)
            tokens += flag.spell([str(v) for v in values])
    return tokens


def _asks_for_help(argv: Sequence[str], flags: Mapping[str, Flag]) -> bool:
    """A text is forgotten, or begins with dashes, where --help follows its flag."""
    awaiting = {name for name, flag in flags.items() if flag.kind is str}
    return any(
        token in ("--help", "-h") and before not in awaiting for before, token in zip(["", *argv], argv, strict=False)
    )


def _split(
    argv: Sequence[str], flags: Mapping[str, Flag]
) -> tuple[dict[str, list[str]], list[tuple[str, list[str]]], list[str]]:
    """The values typed after each flag we have and after each we have not, and a line for every stray value."""
    # Megatron takes --override-opt_param-scheduler and --override-opt-param-scheduler, and no other second spelling.
    ours = {spelling: name for name in flags for spelling in (name, name.replace("_", "-"))}
    given: dict[str, list[str]] = {}
    others: list[tuple[str, list[str]]] = []
    stray: list[str] = []
    values: list[str] | None = None
    for token in argv:
        name, equals, value = token.partition("=")
        if _FLAG.match(name) and name not in ("-inf", "-infinity", "-nan"):
            values = [value] if equals else []
            if name in ours:
                given[ours[name]] = values
            else:
                others.append((name, values))
        elif values is None:
            shown = token or "''"
            stray.append(f"unexpected {shown}: values follow a flag")
        else:
            values.append(token)
    return given, others, stray


def _old_names(given: dict[str, list[str]], others: list[tuple[str, list[str]]]) -> Iterator[str]:
    """Names that mean a value of another flag. A line for what contradicts it."""
    if len(sizes := given.get(_UNQUOTED, [])) > 1:  # Megatron-LM's script for GPT-3 175B loses the quotes
        given[_UNQUOTED] = [" ".join(sizes)]
    for old, means in OLD_NAMES.items():
        said = [values for other, values in others if other == old]
        if not said:
            continue
        others[:] = [(other, values) for other, values in others if other != old]
        if len(said[-1]) != (_VALUE in means.values()):
            takes = "takes one value" if _VALUE in means.values() else "is a switch and takes no value"
            yield f"{old} {takes}, got {' '.join(said[-1]) or 'none'}"
            continue
        if old in ("--recompute-lgd", "--moe-layer-recompute") and (also := given.keys() & means):
            yield f"{old} is {text_of(means)} here, but {' and '.join(sorted(also))} is given. Leave one out."
        # rotary positions as upstream, where they win over the other flag
        given |= {name: said[-1] if values is _VALUE else values for name, values in means.items()}
    rope = given.get("--position-embedding-type", [""])[-1:] == ["rope"]
    if not rope and any(name == "--no-position-embedding" for name, _ in others):
        yield (
            "--no-position-embedding is ignored beside --position-embedding-type rope and refused without, as in "
            "Megatron-LM. For rotary positions add --position-embedding-type rope; for no positions at all use "
            "--position-embedding-type none instead."
        )


def _schedule_switches(
    given: dict[str, list[str]], others: list[tuple[str, list[str]]], holding: dict[str, str]
) -> Iterator[str]:
    """Put --pipeline-schedule for the zero-bubble fork's switches; a line for what cannot be met."""
    switches = {name: values for name, values in others if name in SWITCHES}
    others[:] = [(name, values) for name, values in others if name not in SWITCHES]
    size = given.get("--pipeline-model-parallel-size", ["1"])
    ranks = int(size[0]) if size and size[0].isdecimal() and len(size[0]) < 10 else 1
    name, problems = chosen(switches, ranks, several=bool(given.keys() & _SEVERAL))
    yield from problems
    if switches.pop(PADDING, None) is not None:
        holding[PADDING] = uneven(given, ranks)
    text = text_of(switches)
    if name is not None and (also := given.get("--pipeline-schedule")):
        yield f"{text} means --pipeline-schedule {name}, but --pipeline-schedule {also[0]} is given. Leave one out."
    elif name is not None:
        given["--pipeline-schedule"] = [name]
    if name is not None and SCHEDULES[name].grouped:
        group = min(ranks, int(switches["--interleave-group-size"][0]))  # as the fork
        given["--microbatch-group-size-per-virtual-pipeline-stage"] = [str(group)]
    if text:
        holding[text] = f"--pipeline-schedule {name}" if name else "without effect: nothing turns such a schedule on"


def text_of(flags: Mapping[str, Sequence[str]]) -> str:
    """Flags and their values as typed."""
    return " ".join(token for name, values in flags.items() for token in (name, *values))


def _other(name: str, values: list[str], ours: Iterable[str], known: Set[str]) -> str | None:
    """The line about a flag that is no field; None if it holds already."""
    if name in known:
        return value_problem(name, values) if name in HOLDS else refusal(name)
    near = difflib.get_close_matches(name if name.startswith("--") else f"-{name}", {*ours, *known}, n=1, cutoff=0.75)
    # No second try for one No.
    also = f" {refusal(near[0])}" if near and near[0] in known - HOLDS.keys() and near[0] not in [*ours] else ""
    return f"unknown flag {name}" + (f"; did you mean {near[0]}?{also}" if near else "")
