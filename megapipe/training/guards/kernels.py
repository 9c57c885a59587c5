"""Use only CPU kernels that all ranks have; otherwise replicas would round differently."""

from __future__ import annotations

from megapipe.distributed.mesh import ProcessMesh
from megapipe.kernels import available

SHOWN = 8
"""Most ranks that a line names."""
_WORDS = {
    "loops": "loops in C (a C compiler, cc or $CC, and a processor with AVX-512)",
    "tiles": "attention by tiles (a C compiler, and a processor and system with AMX)",
}


def use_common(mesh: ProcessMesh) -> list[str]:
    """Turn off the CPU kernels that another rank lacks. Collective over the world on CPUs.

    Returns: lines for the user that name these kernels.
    """
    if mesh.device.type != "cpu":
        return []
    everyone = mesh.world.gather_json(available.own())
    partly = {}
    for name in _WORDS:
        without = [rank for rank, names in enumerate(everyone) if name not in names]
        # A kernel that all ranks lack makes no difference between replicas.
        if 0 < len(without) < len(everyone):
            partly[name] = without
    available.leave_out(partly)
    lines = []
    for name, ranks in partly.items():
        plural = "s" * (len(ranks) > 1)
        listed = ", ".join(map(str, ranks[:SHOWN])) + " and others" * (len(ranks) > SHOWN)
        lines.append(
            f"warning: all ranks compute without {_WORDS[name]}, as rank{plural} {listed} must: "
            "replicas would differ"
        )
    return lines
