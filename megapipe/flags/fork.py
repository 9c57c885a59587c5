"""Switches of sail-sg/zero-bubble-pipeline-parallelism that choose a schedule, as one flag of ours.

As its `zbpp_utils.py` has them, --enable-zero-bubble turns the schedules on.
--zero-bubble-max-pending-backward N is the number of microbatches that a rank may hold: pp for ZB1P
(ZB-H1), 2 x pp for ZB2P (ZB-H2), `auto` for all that fit. It has no effect on V schedules, whose
name says what they hold. --allow-padding-num-layers adds layers that do nothing until all stages
have equally many; here stages get different numbers of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_ENABLE = "--enable-zero-bubble"
_V = "--zero-bubble-v-schedule"
_ONE_F_ONE_B_V = "--enable-1f1b-v"
_SETUP = "--zero-bubble-v-schedule-mem-setup"
_PENDING = "--zero-bubble-max-pending-backward"
_GROUP = "--interleave-group-size"
PADDING = "--allow-padding-num-layers"
_LAYOUT = "--pipeline-model-parallel-layout"
_PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
_PER_RANK = "--num-virtual-stages-per-pipeline-rank"
_V_SETUPS = {"zb": "zb-v", "half": "v-half", "min": "v-min"}

_VALUED = (_SETUP, _PENDING, _GROUP)

_MEANS = {
    _ENABLE: "zb-h1, zb-h2 or zb-auto",
    _PENDING: "which of them: from pp on zb-h1, from 2 x pp on zb-h2, auto (the default) zb-auto",
    _V: "zb-v",
    _SETUP: "which V: zb is zb-v, half v-half, min v-min",
    _ONE_F_ONE_B_V: "1f1b-v",
    _GROUP: "group-interleaved, in groups of this many microbatches, if a rank has several stages",
}
SWITCHES = {switch: f"--pipeline-schedule {name}" for switch, name in _MEANS.items()} | {
    PADDING: f"{_LAYOUT} auto, where the layers do not divide"
}
"""Each switch, with the flag that it means."""


def uneven(given: dict[str, list[str]], ranks: int) -> str:
    """Replace --allow-padding-num-layers by flags of megapipe for an uneven split of the layers.

    Args:
        given: megapipe's flags with their values as typed. It is changed in place: the new flags
            are put here, and --num-layers-per-virtual-pipeline-stage is replaced by one of them.
        ranks: number of pipeline ranks.
    Returns: a text with the new flags; if there are none, the reason.
    """
    numbers = [given.get(name, ["0"]) for name in ("--num-layers", _PER_STAGE)]
    # The fork's empty layers would have no place in a split that another flag gives.
    if any("decoder-" in name or "account-for" in name or name == _LAYOUT for name in given):
        return "another flag says which stage holds how many layers"
    if not all(len(values) == 1 and _is_number(values[0]) for values in numbers):
        return "without effect"
    layers, per_stage = (int(values[0]) for values in numbers)
    if layers % (ranks * (per_stage or 1)) == 0:
        return "the layers fill the stages"
    means = {_LAYOUT: ["auto"]}
    if given.pop(_PER_STAGE, None):
        # The fork rounds the layers up to full stages.
        means[_PER_RANK] = [str(layers // (ranks * per_stage) + 1)]
    given |= means
    return " ".join(f"{name} {value}" for name, (value,) in means.items())


def chosen(
    given: Mapping[str, Sequence[str]], ranks: int, *, several: bool
) -> tuple[str | None, list[str]]:
    """Return the schedule that switches of the zero-bubble fork of Megatron-LM mean.

    Args:
        given: the switches and their values as typed.
        ranks: number of pipeline ranks.
        several: whether another flag gives a rank several stages.
    Returns: (name of the schedule, a line for each problem). The name is None if the switches
        choose none, or if there are problems.
    """
    problems = []
    for name, values in given.items():
        if len(values) != (name in _VALUED):
            takes = "one value" if name in _VALUED else "no value"
            problems.append(f"{name} takes {takes}, got {' '.join(values) or 'none'}")
    if problems:
        return None, problems
    if _ONE_F_ONE_B_V in given:
        return "1f1b-v", []
    if _V in given:
        setup = given.get(_SETUP, ["zb"])[0]
        if setup not in _V_SETUPS:
            return None, [f"{_SETUP} {setup}: expected zb, half or min"]
        return _V_SETUPS[setup], []
    if _ENABLE not in given:
        size = given.get(_GROUP, ["0"])[0]
        return _by_groups(size, ranks) if several else (None, [])
    pending = given.get(_PENDING, ["auto"])[0]
    # The fork fills the memory of a rank, and so does zb-auto.
    if pending == "auto":
        return "zb-auto", []
    if not _is_number(pending) or int(pending) < ranks:
        return None, [
            f"{_PENDING} {pending}: a microbatch for each of {ranks} pipeline ranks is the least. "
            f"Use {ranks} (zb-h1), {2 * ranks} (zb-h2) or auto."
        ]
    return "zb-h2" if int(pending) >= 2 * ranks else "zb-h1", []


def _by_groups(size: str, ranks: int) -> tuple[str | None, list[str]]:
    """Return (schedule or None, problems) for --interleave-group-size.

    Args:
        size: the value as typed; 0 stands for no groups.
        ranks: number of pipeline ranks.
    """
    if size == "0":
        return None, []
    least = (ranks + 1) // 2
    if _is_number(size) and int(size) >= least:
        return "group-interleaved", []
    return None, [
        f"{_GROUP} {size}: a group has at least half of {ranks} pipeline ranks. "
        f"Use {least} to {ranks}."
    ]


def _is_number(text: str) -> bool:
    """Return whether a text is a natural number of less than 20 digits, which int() can read."""
    return text.isdecimal() and len(text) < 20
