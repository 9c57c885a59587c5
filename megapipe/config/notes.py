"""Annotations of a field: what its type and default do not say of its flag."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spelled:
    """Flag whose name is not the field's with dashes."""

    flag: str


@dataclass(frozen=True)
class _NoFlag:
    """Field that is set by us alone."""


NO_FLAG = _NoFlag()
