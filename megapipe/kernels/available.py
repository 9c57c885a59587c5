"""Choose the compiled kernels that every rank of a run has.

A compiled kernel rounds differently from torch's own operations. Replicas of a weight stay bitwise
equal only if all ranks compute with the same kernels.
"""

from __future__ import annotations

from collections.abc import Collection

from megapipe.kernels import attention, cpu

_LIBRARIES = {"loops": cpu.library, "tiles": attention.library}
"""Name of a library -> the function that loads it, or returns None where it cannot run."""


def own() -> list[str]:
    """Return the names of the compiled libraries that this machine can run: "loops", "tiles".

    "loops" is cpu.c, and "tiles" is attention.c, which needs AMX. Libraries that this process has
    disabled are enabled again first.
    """
    # In one process a run may follow another, whose ranks lacked a library.
    leave_out(())
    return [name for name, library in _LIBRARIES.items() if library() is not None]


def leave_out(names: Collection[str]) -> None:
    """Disable compiled libraries by name from now on, and enable all others."""
    cpu.left_out = frozenset(names)
