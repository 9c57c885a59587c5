"""Replicas that start equal stay so, by equal gradients; one that differs at the start differs for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256

import torch
import torch.nn.functional as F
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
    mine = hashes(dict(sorted(tensors.items())), axis.device)
    # One hash of all hashes first: where all is well, which is always, no names travel.
    if len(set(axis.gather_json(sha256(json.dumps(mine).encode()).hexdigest()))) == 1:
        return
    everyone = axis.gather_json(mine)
    for name in mine:
        rows = zip(axis.ranks, everyone, strict=True)
        if others := [str(rank) for rank, row in rows if row.get(name) != everyone[0].get(name)]:
            yield f"{name} on {what} ranks {axis.ranks[0]} and {', '.join(others)}"


def hashes(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, str]:
    """A hash of each tensor's bits, and whether it is trained: made where the tensors are, and copied once for all."""
    folded = [_folded(_words(x)).to(device) for x in tensors.values()]
    values = torch.stack(folded).tolist() if folded else []
    frozen = ("" if x.requires_grad else "frozen " for x in tensors.values())
    return {name: f"{text}{value % 2**64:016x}" for name, text, value in zip(tensors, frozen, values, strict=True)}


_ROW = 4096
_AT_ONCE = {"cuda": 1 << 25}
"""Words that are multiplied at once; elsewhere what a CPU's cache takes, 1 << 17."""


def _words(x: Tensor) -> Tensor:
    """The bits of a tensor as int64, zeros behind the last ones."""
    data = x.detach().contiguous().flatten().view(torch.uint8)
    return (F.pad(data, (0, -len(data) % 8)) if len(data) % 8 or data.storage_offset() % 8 else data).view(torch.int64)


def _folded(words: Tensor) -> Tensor:
    """One int64 of all words: each times an odd number of its own, summed by rows; the same of the sums.

    What is summed has its upper bits in the lower ones too: two flipped signs would cancel else.
    """
    while len(words) > 1:
        rows = []
        for part in torch.split(words, _AT_ONCE.get(words.device.type, 1 << 17)):
            whole = (F.pad(part, (0, -len(part) % _ROW)) if len(part) % _ROW else part).view(-1, _ROW)
            mixed = whole * _odd(words.device)
            rows.append(mixed.bitwise_xor_(mixed >> 31).sum(1))
        words = torch.cat(rows)
    return words.sum()


@cache
def _odd(device: torch.device) -> Tensor:
    drawn = torch.randint(-(2**62), 2**62, (_ROW,), generator=torch.Generator().manual_seed(0))
    return (2 * drawn + 1).to(device)
