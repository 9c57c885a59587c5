"""Flags to configuration and back; tyro prints the help.

Megatron takes each name as it is spelled, and a user with three wrong flags wants to read three lines.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import tyro

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags.fork import PADDING, SWITCHES, chosen, uneven
from megapipe.flags.holds import HOLDS
from megapipe.flags.rules import KNOWN, refusal, value_problem
from megapipe.flags.stop import program
from megapipe.flags.stop import run as run
from megapipe.flags.stop import stop as stop

T = TypeVar("T")
_VALUE = ["VALUE"]
OLD_NAMES: Mapping[str, Mapping[str, list[str]]] = {
    "--layernorm-epsilon": {"--norm-epsilon": _VALUE},
    "--activations-checkpoint-method": {"--recompute-granularity": ["full"], "--recompute-method": _VALUE},
    "--use-rotary-position-embeddings": {"--position-embedding-type": ["rope"]},
    "--recompute-lgd": {"--recompute-granularity": ["selective"], "--recompute-modules": ["layernorm", "mlp"]},
    "--moe-layer-recompute": {"--recompute-granularity": ["selective"], "--recompute-modules": ["moe"]},
    "--enable-vocab-parallel": {"--vocab-parallel-pipeline": []},
}
"""A name -> the flags and values that it means; VALUE is its own. The first two are of 2023 and before. The fork for
zero bubble computes norms, GELU and dropout again; then one of Megatron-LM's own; the last is the vocabulary-parallel
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
        try:
            style = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
            tyro.cli(cls, args=["--help"], config=style, prog=program())
        except BrokenPipeError:  # `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes it once more
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


def to_flags(config: object) -> list[str]:
    """The flags that differ from the defaults, such that parse(type(config), to_flags(config)) == config."""
    tokens: list[str] = []
    for flag in flags_of(type(config)).values():
        value = getattr(getattr(config, flag.section) if flag.section else config, flag.field)
        if value != flag.default:
            values = value if flag.count == "many" else () if flag.count == "none" else (value,)
            tokens += flag.spell([str(v) for v in values])
    return tokens


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag and the field it sets."""

    name: str
    owner: type
    section: str
    field: str
    kind: Any
    default: Any

    @property
    def count(self) -> Literal["none", "one", "many"]:
        """How many values the flag takes: a switch takes none."""
        if self.kind is bool:
            return "none"
        return "many" if get_origin(self.kind) is tuple else "one"

    @property
    def allowed(self) -> str:
        """What a value may be, in words."""
        kind = get_args(self.kind)[0] if self.count == "many" else self.kind
        if get_origin(kind) is Literal:
            *most, last = map(str, get_args(kind))
            return f"{', '.join(most)} or {last}" if most else f"only {last}"
        words = {int: "an integer", float: "a number", str: "a text"}
        return words[kind]

    def spell(self, values: Sequence[str]) -> list[str]:
        """Tokens of a command line; `=` where a value would look like a flag."""
        if self.count == "one" and values[0].startswith("-"):
            return [f"{self.name}={values[0]}"]
        return [self.name, *values]

    def count_problem(self, values: Sequence[str]) -> str | None:
        """What is wrong with how many values there are."""
        text = " ".join(values)
        if self.count == "none":
            return f"{self.name} is a switch and takes no value, got {text}" if values else None
        if not values:
            dashes = f"; one that begins with a dash is written {self.name}=-..." if self.kind is str else ""
            return f"{self.name} needs a value: {self.allowed}{dashes}"
        if self.count == "one" and len(values) > 1:
            return f'{self.name} takes one value, got {len(values)}: {text} (quote it: {self.name} "{text}")'
        return None

    def value_problem(self, values: Sequence[str]) -> str | None:
        """What is wrong with the values themselves, if there are as many as there should be."""
        if self.count_problem(values):
            return None
        try:
            self.read(values)
        except (KeyError, ValueError):
            return f"{self.name} {' '.join(values)}: expected {self.allowed}"
        return None

    def read(self, values: Sequence[str]) -> Any:
        """The value of the field. Raises: KeyError or ValueError."""
        if self.count == "none":
            return not self.default
        kind = get_args(self.kind)[0] if self.count == "many" else self.kind
        read = {str(choice): choice for choice in get_args(kind)}.__getitem__ if get_origin(kind) is Literal else kind
        found = tuple(map(read, values))
        return found if self.count == "many" else found[0]


def flags_of(cls: type) -> dict[str, Flag]:
    """Every flag of a configuration class, by name."""
    return {flag.name: flag for flag in _flags(cls, "")}


@functools.cache
def _flags(cls: type, section: str) -> tuple[Flag, ...]:
    found: list[Flag] = []
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else [hint]
        if tyro.conf.Suppress in notes:
            continue
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            assert not section, "two levels: a configuration and its sections"
            found += _flags(kind, field.name)
            continue
        named = next((note.name for note in notes if getattr(note, "name", None)), field.name.replace("_", "-"))
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        assert default is not dataclasses.MISSING, f"{cls.__name__}.{field.name}: a flag has a default"
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(k for k in get_args(kind) if k is not types.NoneType)
        found.append(Flag(f"--{named}", cls, section, field.name, kind, default))
    return tuple(found)


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
            stray.append(f"unexpected {token}: values follow a flag")
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
    if name == "group-interleaved":
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
