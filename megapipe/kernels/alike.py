"""Kernels that every rank of a run has: weights that ranks share keep their bits only where all compute alike."""

from __future__ import annotations

from collections.abc import Collection

from megapipe.kernels import attention, cpu

_LIBRARIES = {"loops": cpu.library, "tiles": attention.library}


def own() -> list[str]:
    """Libraries that this machine has: compiled loops, and attention by its processor's tiles."""
    leave_out(())
    return [name for name, library in _LIBRARIES.items() if library() is not None]


def leave_out(names: Collection[str]) -> None:
    """Compute without these from now on."""
    cpu.left_out = frozenset(names)
