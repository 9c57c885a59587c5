"""Flags to a configuration, and back.

Every name is taken as Megatron-LM spells it. All wrong flags are reported at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.flags import unset
from megapipe.flags.flag import Flag as Flag
from megapipe.flags.flag import flags_of as flags_of
from megapipe.flags.fork import PADDING, SWITCHES, chosen, uneven
from megapipe.flags.help import help_text
from megapipe.flags.noop_flags import NOOP_FLAGS
from megapipe.flags.old_names import OLD_NAMES, Given, old_names, text_of
from megapipe.flags.rules import KNOWN, OF_PLAN, refusal, value_problem
from megapipe.flags.stop import program, say
from megapipe.flags.stop import run as run
from megapipe.flags.stop import stop as stop
from megapipe.schedule import SCHEDULES

T = TypeVar("T")
_AXES = {
    "--tp": "--tensor-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--ep": "--expert-model-parallel-size",
    "--etp": "--expert-tensor-parallel-size",
    "--micro": "--micro-batch-size",
}
"""The short names that a search has for its axes, and the flags of a run."""
# Not every dash: -1 and -.5 are values.
_FLAG = re.compile(r"--|-[A-Za-z]")
# A flag in the text of an error.
_NAMED = re.compile(r"(?<![\w-])--[A-Za-z0-9][\w-]*")
# Flags that give a rank several stages, without which --interleave-group-size means nothing.
_SEVERAL = {"--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"}


class _Typed(NamedTuple):
    """The words of a command line, as flags of the parsed class, other flags and mistakes.

    Attributes:
        given: {flag: values as typed} of the flags of the class that is parsed.
        others: (name, values) of all other flags.
        replaced: (flag, values) of flags of the class that are given again further on.
        stray: an error for each value that follows no flag.
    """

    given: Given
    others: list[tuple[str, list[str]]]
    replaced: list[tuple[str, list[str]]]
    stray: list[str]


@dataclass(frozen=True)
class Read(Generic[T]):
    """A command line, as far as it can be read.

    Attributes:
        value: the configuration. Flags that cannot be read have their defaults in it.
        problems: an error for each unknown flag and each unreadable value.
        unread: the flags that these errors name. A check of `value` may be wrong about such flags:
            for example it calls a misspelled flag missing.
    """

    value: T
    problems: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()

    def without_unread(self, found: Iterable[str]) -> list[str]:
        """Return the problems of `value` in `found` that name no unread flag."""
        return [line for line in found if self.unread.isdisjoint(_NAMED.findall(line))]


def parse(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """Read flags into a configuration. `--help` prints its text and exits.

    A flag that is given several times has the last value.

    Args:
        cls: a dataclass whose fields are flags, or are dataclasses with such fields. For `Config`
            the other flags of Megatron-LM are known too, and accepted or refused.
        argv: flags and values. Default: sys.argv[1:].

    Raises: ConfigError with every unknown flag and unreadable value. `stop` prints it as argparse
        would.
    """
    found = read(cls, argv)
    if found.problems:
        raise ConfigError(found.problems)
    return found.value


def read(
    cls: type[T], argv: Sequence[str] | None = None, *, besides: Iterable[str] = ()
) -> Read[T]:
    """Return the configuration together with the problems, where `parse` would raise an error.

    Args:
        argv: flags and values; None for sys.argv[1:]. `--help` prints its text and exits.
        besides: flags of a tool on the same command line. A misspelled name may mean one of these.
    """
    if argv is None:
        argv = sys.argv[1:]
    flags = flags_of(cls)
    # Before anything is checked: help must come whatever else is wrong.
    if _asks_for_help(argv, flags):
        more = [unset.HELP] if issubclass(cls, Config) else []
        say(help_text(cls, flags, program(), shutil.get_terminal_size().columns, more))
        sys.exit(0)
    taken_back: list[str] = []
    if issubclass(cls, Config):
        argv, taken_back = unset.without_unset(argv)
    given, others, replaced, problems = _split(argv, flags)
    noops: dict[str, str] = {}
    known: Set[str] = frozenset()
    # A tool has flags of its own only; names of Megatron-LM mean nothing to it.
    if issubclass(cls, Config):
        known = KNOWN
        problems += old_names(given, others)
        problems += _schedule_switches(given, others, noops)
        for name, values in others:
            if name in NOOP_FLAGS:
                noops[" ".join((name, *values))] = NOOP_FLAGS[name].because
        # Of a list many a user expects that its parts add up.
        for name, values in replaced:
            if flags[name].count == "many" and values != given[name]:
                noops[" ".join((name, *values))] = "given again: the last one counts"
    # A line for each, the unknown ones first.
    ours = {*flags, *besides}
    problems += _unknown_to(taken_back, {*flags}, {*besides, *OF_PLAN})
    lines = [_other(name, values, ours, known) for name, values in others]
    lines += [flags[name].count_problem(values) for name, values in given.items()]
    lines += [flags[name].value_problem(values) for name, values in given.items()]
    problems += filter(None, lines)
    unread = set[str]()
    for line in problems:
        # The first flag is the wrong one; others are what an unknown one may mean, or remedies.
        names = _NAMED.findall(line)
        unread.update(names if line.startswith("unknown flag") else names[:1])
    sections: dict[str, dict[str, Any]] = {"": {}}
    if noops:
        sections[""]["noop_flags"] = tuple(noops.items())
    for name, values in given.items():
        flag = flags[name]
        if flag.count_problem(values) or flag.value_problem(values):
            continue
        sections.setdefault(flag.section, {})[flag.field] = flag.read(values)
    # Fields are replaced and not assigned: a configuration is frozen.
    parsed: Any = cls()
    top = sections.pop("")
    for section, fields in sections.items():
        top[section] = dataclasses.replace(getattr(parsed, section), **fields)
    return Read(dataclasses.replace(parsed, **top), tuple(problems), frozenset(unread))


def parse_among(own: type[T], argv: Sequence[str]) -> tuple[T, Config]:
    """Return (the tool's flags, the run's configuration) from a command line that mixes both.

    `--help` prints the tool's text and exits.

    Args:
        own: the dataclass of the tool's flags.
    Raises: ConfigError with the problems of both.
    """
    tool, config = read_among(own, argv)
    if problems := [*tool.problems, *config.problems]:
        raise ConfigError(problems)
    return tool.value, config.value


def read_among(own: type[T], argv: Sequence[str]) -> tuple[Read[T], Read[Config]]:
    """Return (the tool's flags, the run's configuration), each with its problems.

    Args:
        own: the dataclass of the tool's flags.
    """
    of_tool, of_run = split_among(own, argv)
    return read(own, of_tool), read(Config, of_run, besides=flags_of(own))


def split_among(own: type, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (the words of a tool's flags, the words of all other flags), with their values.

    Args:
        own: the dataclass of the tool's flags.
    """
    names = {*flags_of(own), "--help", "-h"}
    words: dict[bool, list[str]] = {True: [], False: []}
    of_tool = False
    for word in argv:
        if _FLAG.match(word):
            # Values follow their flag, so a word without dashes goes where the last flag went.
            of_tool = word.partition("=")[0] in names
        words[of_tool].append(word)
    return words[True], words[False]


def place_of_dashes(argv: Sequence[str], example: str) -> int:
    """Return the index of the `--` that ends a tool's own flags in a command line.

    If there is none and help is asked for, the result is the length of `argv`.

    Args:
        example: a command line to show in the error.
    Raises: ConfigError if there is no `--`, and help is not asked for.
    """
    if "--" in argv:
        return argv.index("--")
    if not {"--help", "-h"} & {*argv}:
        raise ConfigError(f"give the command to run after --, as in {example}")
    return len(argv)


def to_flags(config: object) -> list[str]:
    """Return the flags, with values, of all fields that differ from their defaults.

    `parse(type(config), to_flags(config))` equals the configuration, but for fields that are no
    flags, such as Config.world_size.
    """
    words: list[str] = []
    for flag in flags_of(type(config)).values():
        section = getattr(config, flag.section) if flag.section else config
        value = getattr(section, flag.field)
        # Two runs that do the same then have the same line, whichever defaults were typed.
        if value == flag.default:
            continue
        if flag.count == "none":
            words += flag.spell([])
        else:
            values = value if flag.count == "many" else (value,)
            words += flag.spell([str(v) for v in values])
    return words


def _asks_for_help(argv: Sequence[str], flags: Mapping[str, Flag]) -> bool:
    """Return whether --help is a flag, and not the value of the flag before it."""
    # A text may be "--help", as in --tokenizer-model --help; a number may not.
    awaiting = {name for name, flag in flags.items() if flag.kind is str}
    pairs = zip(["", *argv], argv, strict=False)
    return any(word in ("--help", "-h") and before not in awaiting for before, word in pairs)


def _split(argv: Sequence[str], flags: Mapping[str, Flag]) -> _Typed:
    # Megatron-LM spells one flag --override-opt_param-scheduler, and takes
    # --override-opt-param-scheduler too.
    ours = {spelling: name for name in flags for spelling in (name, name.replace("_", "-"))}
    typed = _Typed({}, [], [], [])
    values: list[str] | None = None
    for word in argv:
        name, equals, value = word.partition("=")
        # These three look like flags and are numbers.
        if _FLAG.match(name) and name not in ("-inf", "-infinity", "-nan"):
            values = [value] if equals else []
            if name in ours:
                # The words that follow are appended to this list. A flag that is given twice starts
                # a new one, and so the last one counts.
                if ours[name] in typed.given:
                    typed.replaced.append((ours[name], typed.given[ours[name]]))
                typed.given[ours[name]] = values
            else:
                typed.others.append((name, values))
        elif values is None:
            shown = word or "''"
            typed.stray.append(f"unexpected {shown}: values follow a flag")
        else:
            values.append(word)
    return typed


def _unknown_to(taken_back: Iterable[str], ours: Set[str], of_tools: Set[str]) -> Iterator[str]:
    """Yield an error for each flag of --unset that no run could have been given.

    Args:
        taken_back: the flags that --unset names.
        ours: the flags of a run.
        of_tools: flags of tools, which --unset does not take back.
    """
    run = {name.replace("_", "-") for name in {*ours, *OLD_NAMES, *SWITCHES}}
    for name in taken_back:
        head = f"{unset.UNSET} {name.removeprefix('--')}"
        if name in of_tools:
            yield f"{head}: only flags of a run can be taken back. Leave {name} out."
        elif name.replace("_", "-") not in run:
            line = _other(name, [], ours, KNOWN) or ""
            if line.startswith("unknown flag"):
                yield f"{head}: {line}"


def _schedule_switches(
    given: Given, others: list[tuple[str, list[str]]], noops: dict[str, str]
) -> Iterator[str]:
    """Replace the zero-bubble fork's switches by --pipeline-schedule, and yield each problem.

    The fork is sail-sg's of Megatron-LM.

    Args:
        given: {flag of megapipe: values}; --pipeline-schedule is added.
        others: (name, values) of other flags; the switches are removed.
        noops: {flag that sets no field: what happens instead}; the switches are added.
    """
    switches = {name: values for name, values in others if name in SWITCHES}
    others[:] = [(name, values) for name, values in others if name not in SWITCHES]
    size = given.get("--pipeline-model-parallel-size", ["1"])
    # A wrong size is reported with the other flags; here 1 stands for it. int() refuses thousands
    # of digits.
    ranks = int(size[0]) if size and size[0].isdecimal() and len(size[0]) < 10 else 1
    name, problems = chosen(switches, ranks, several=bool(given.keys() & _SEVERAL))
    yield from problems
    if switches.pop(PADDING, None) is not None:
        noops[PADDING] = uneven(given, ranks)
    text = text_of(switches)
    if text:
        noops[text] = "without effect: nothing turns such a schedule on"
    if name is None:
        return
    if also := given.get("--pipeline-schedule"):
        yield (
            f"{text} means --pipeline-schedule {name}, but --pipeline-schedule {also[0]} is given. "
            "Leave one out."
        )
    else:
        given["--pipeline-schedule"] = [name]
    noops[text] = f"--pipeline-schedule {name}"
    if SCHEDULES[name].grouped:
        # As in the fork, a group has at most as many microbatches as there are ranks.
        group = min(ranks, int(switches["--interleave-group-size"][0]))
        given["--microbatch-group-size-per-virtual-pipeline-stage"] = [str(group)]


def _other(name: str, values: list[str], ours: Iterable[str], known: Set[str]) -> str | None:
    """Return the error for a flag that sets no field; None if the flag is accepted without effect.

    Args:
        values: as typed.
        ours: the flags that set a field, among which a misspelled name is looked for.
        known: the flags of Megatron-LM and its zero-bubble fork.
    """
    if name == unset.UNSET:
        return f"{name} needs names of flags without their dashes: {name} tp-comm-overlap"
    if name in known or name in OF_PLAN:
        return value_problem(name, values) if name in NOOP_FLAGS else refusal(name)
    like = name if name.startswith("--") else f"-{name}"
    if name in _AXES:
        return f"unknown flag {name}; did you mean {_AXES[name]}?"
    # 0.75 finds a lost or doubled letter, and not another flag that begins in the same way.
    near = difflib.get_close_matches(like, {*ours, *known}, n=1, cutoff=0.75)
    if not near:
        return f"unknown flag {name}"
    line = f"unknown flag {name}; did you mean {near[0]}?"
    # Say at once that the right spelling would be refused too.
    if near[0] in known - NOOP_FLAGS.keys() and near[0] not in [*ours]:
        line += f" {refusal(near[0])}"
    return line
