"""Kernels of a CPU that only some ranks have, which none then uses: replicas would round apart."""

from __future__ import annotations

from megapipe.distributed.mesh import ProcessMesh
from megapipe.kernels import available

SHOWN = 8
"""Ranks that the line names."""
_WORDS = {
    "loops": "loops in C (a C compiler, cc or $CC, and a processor with AVX-512)",
    "tiles": "attention by tiles (a C compiler, and a processor and system with AMX)",
}


def use_alike(mesh: ProcessMesh) -> list[str]:
    """Leave out what another rank has not. A collective of the world on CPUs.

    Returns: lines for the user.
    """
    if mesh.device.type != "cpu":
        return []
    everyone = mesh.world.gather_json(available.own())
    without = {name: [rank for rank, names in enumerate(everyone) if name not in names] for name in _WORDS}
    partly = {name: ranks for name, ranks in without.items() if 0 < len(ranks) < len(everyone)}
    available.leave_out(partly)
    return [
        f"warning: all ranks compute without {_WORDS[name]}, as rank{'s' * (len(ranks) > 1)} "
        f"{', '.join(map(str, ranks[:SHOWN]))}{' and others' * (len(ranks) > SHOWN)} must: replicas would differ"
        for name, ranks in partly.items()
    ]
