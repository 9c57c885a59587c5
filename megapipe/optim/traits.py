"""Describe optimizer rules for plans and checks, which need no torch for the rules of this package.

Importing torch takes seconds, and a plan asks a rule only for the names of its state.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from megapipe.config import OptimizerConfig

FLAG = "--optimizer"


class Traits(NamedTuple):
    """The properties of an optimizer: the state that it stores, and what it allows.

    Attributes:
        elementwise: whether ZeRO-1 may split parameters.
        may_round: whether the state may be stored in 16 bits.
        state: names of the tensors that are kept for every parameter, such as exp_avg.
    """

    elementwise: bool
    may_round: bool
    state: tuple[str, ...]


KNOWN = {
    "adam": Traits(True, True, ("exp_avg", "exp_avg_sq")),
    "sgd": Traits(True, False, ("momentum",)),
    # AdamW updates embeddings and vectors, and both keep tensors of the same names.
    "muon": Traits(False, False, ("exp_avg", "exp_avg_sq")),
}
"""The properties of each rule of this package, by the value of --optimizer."""


def traits_of(flags: OptimizerConfig) -> Traits:
    """Return the properties of the optimizer that --optimizer names.

    Raises: ConfigError for an unknown name, or if FILE.py:NAME does not return a Rule.
    """
    if flags.optimizer in KNOWN:
        return KNOWN[flags.optimizer]
    # A rule of the user's is made of torch.
    rule = import_module("megapipe.optim.rules").find_rule(flags)
    return Traits(rule.elementwise, getattr(rule, "may_round", False), rule.state)


def split_problem(
    flags: OptimizerConfig, elementwise: bool, by: str = "--use-distributed-optimizer"
) -> str | None:
    """Return the error text for ZeRO-1 with an optimizer that needs whole parameters.

    Returns None for any other optimizer. Whether ZeRO-1 is in use is the caller's question.

    Args:
        elementwise: whether the optimizer allows ZeRO-1 to split parameters.
        by: the flag that asks for ZeRO-1.
    """
    if elementwise:
        return None
    return (
        f"{FLAG} {flags.optimizer} needs whole parameters, and {by} splits them over data-parallel "
        f"ranks. Leave {by} out, or use {FLAG} adam."
    )


def rounding_problem(flags: OptimizerConfig, may_round: bool) -> str | None:
    """Return an error text if an optimizer's state cannot be stored in 16 bits, else None.

    Args:
        may_round: whether the rule's state may be stored in 16 bits.
    """
    if may_round:
        return None
    return (
        f"--use-precision-aware-optimizer is for {FLAG} adam, got {flags.optimizer}. "
        f"Leave --use-precision-aware-optimizer out, or use {FLAG} adam."
    )
