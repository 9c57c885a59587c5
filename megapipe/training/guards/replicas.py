"""Replicas that start equal stay so, by equal gradients; one that differs at the start differs for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import Axis
from megapipe.distributed.layout import layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError, RanksDiffer


def check_replicas(
    modules: Sequence[nn.Module], mesh: ProcessMesh, *, mirrored: bool, after: int | None = None
) -> None:
    """Compare parameters and buffers over the ranks that have the same and, if `mirrored`, with DualPipe's twins, and
    over tensor parallel the parameters that are whole on each rank: one hash of a rank where all is well. Collective
    over the mesh.

    Args:
        after: iterations that were trained; None at the start.
    Raises: ConfigError on every rank, with the names of those that differ; RanksDiffer after an iteration.
    """
    params = dict(pair for module in modules for pair in module.named_parameters())
    tensors = {**params, **dict(pair for module in modules for pair in module.named_buffers())}
    experts = {name: param for name, param in params.items() if layout_of(param).experts}
    dense = {name: x for name, x in tensors.items() if name not in experts}
    groups: list[tuple[str, Axis, Mapping[str, Tensor]]] = [
        ("data-parallel", mesh.dp_cp, dense),
        ("expert-data-parallel", mesh.edp, experts),
        ("tensor-parallel", mesh.tp, _whole(dense, params)),
        ("expert-tensor-parallel", mesh.etp, _whole(experts, params)),
        ("pipeline", mesh.twins if mirrored else Axis(), tensors),
    ]
    problems = [line for what, axis, compared in groups for line in _differing(what, axis, compared)]
    found = list(dict.fromkeys(line for lines in mesh.world.gather_json(problems) for line in lines))
    if not found:
        return
    names = "".join(f"\n      {line}" for line in found[:20])
    names += f"\n      and {len(found) - 20} more" if len(found) > 20 else ""
    if after is None:
        raise ConfigError(
            f"replicas of the model start with different values, and would stay different:{names}"
            "\n      Let the model provider draw initial values by torch's functions alone, the same on every rank "
            "(not by random, numpy or the rank), or give the parameter a Layout."
        )
    raise RanksDiffer(
        f"replicas of the model differ after iteration {after}:{names}"
        "\n      They had equal gradients and updates: a device or its memory may be at fault. The last checkpoint is "
        "sound if they were equal then."
    )


def _whole(tensors: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of which each rank has all, or all of its experts."""
    return {name: x for name, x in tensors.items() if name in params and layout_of(x).dim is None}


def _differing(what: str, axis: Axis, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    if axis.size == 1:
        return
    hashes = {name: _hash(x) for name, x in sorted(tensors.items())}
    # One hash of all hashes first: where all is well, which is always, no names travel.
    if len(set(axis.gather_json(sha256(json.dumps(hashes).encode()).hexdigest()))) == 1:
        return
    everyone = axis.gather_json(hashes)
    for name in hashes:
        rows = zip(axis.ranks, everyone, strict=True)
        if others := [str(rank) for rank, row in rows if row.get(name) != everyone[0].get(name)]:
            yield f"{name} on {what} ranks {axis.ranks[0]} and {', '.join(others)}"


def _hash(x: Tensor) -> str:
    """The hash of a tensor's bits, and whether it is trained."""
    frozen = "" if x.requires_grad else "frozen "
    return frozen + sha256(x.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data).hexdigest()[:16]
