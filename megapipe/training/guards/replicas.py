"""Compare the replicas of a model.

Replicas that start equal stay equal, because their gradients are equal. Replicas that differ at the
start would differ until the end of the run.
"""

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
    """Compare parameters and buffers between all ranks that have a copy of the same tensor.

    Parameters that tensor parallelism does not split are also compared over tensor-parallel ranks.
    If nothing differs, a rank sends one hash along each axis. Collective over the mesh.

    Args:
        modules: this rank's stages.
        mesh: this rank's mesh.
        mirrored: compare the two ranks that have the same stage under DualPipe, too.
        after: number of trained iterations; None at the start.
    Raises: ConfigError on every rank at the start, with the first 20 names of differing tensors.
        Later RanksDiffer.
    """
    params = dict(pair for module in modules for pair in module.named_parameters())
    buffers = dict(pair for module in modules for pair in module.named_buffers())
    tensors = {**params, **buffers}
    experts = {name: param for name, param in params.items() if layout_of(param).experts}
    dense = {name: x for name, x in tensors.items() if name not in experts}
    groups: list[tuple[str, Axis, Mapping[str, Tensor]]] = [
        ("data-parallel", mesh.dp_cp, dense),
        ("expert-data-parallel", mesh.edp, experts),
        ("tensor-parallel", mesh.tp, _unsplit(dense, params)),
        ("expert-tensor-parallel", mesh.etp, _unsplit(experts, params)),
        ("pipeline", mesh.twins if mirrored else Axis(), tensors),
    ]
    problems: list[str] = []
    for axis_name, axis, compared in groups:
        # Each along its own axis: experts have other replicas than the rest of the model.
        problems += _differing(axis_name, axis, compared)
    # Every rank gathers, so that all raise the same error.
    everyone = mesh.world.gather_json(problems)
    found = list(dict.fromkeys(line for lines in everyone for line in lines))
    if not found:
        return
    names = "".join(f"\n      {line}" for line in found[:20])
    if len(found) > 20:
        names += f"\n      and {len(found) - 20} more"
    if after is None:
        raise ConfigError(
            f"replicas of the model start with different values, and would stay different:{names}"
            "\n      Let the model provider draw initial values by torch's functions alone, the "
            "same on every rank (not by random, numpy or the rank), or give the parameter a Layout."
        )
    raise RanksDiffer(
        f"replicas of the model differ after iteration {after}:{names}"
        "\n      They had equal gradients and updates: a device or its memory may be at fault. The "
        "last checkpoint is sound if they were equal then."
    )


def _unsplit(tensors: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, of these tensors, the parameters that tensor parallelism does not split.

    tensors: {name: parameter or buffer}. params: {name: parameter}.
    """
    # Not buffers: without a layout nobody knows whether each rank has a part of one.
    return {name: x for name, x in tensors.items() if name in params and layout_of(x).dim is None}


def _differing(axis_name: str, axis: Axis, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a line for each tensor that differs between ranks of an axis. Collective over the axis.

    Args:
        axis_name: the name of the axis in the lines, such as data-parallel.
        axis: the ranks.
        tensors: the tensors by name.
    """
    if axis.size == 1:
        return
    mine = hashes(dict(sorted(tensors.items())), axis.device)
    # One hash of all hashes comes first: nearly always nothing differs, and no names are sent.
    total = sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(axis.gather_json(total))) == 1:
        return
    everyone = axis.gather_json(mine)
    for name in mine:
        rows = zip(axis.ranks, everyone, strict=True)
        others = [str(rank) for rank, row in rows if row.get(name) != everyone[0].get(name)]
        if others:
            yield f"{name} on {axis_name} ranks {axis.ranks[0]} and {', '.join(others)}"


def hashes(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, str]:
    """Return {name: text} with a hash of each tensor's bits, after "frozen " for a frozen one.

    Args:
        tensors: the tensors by name.
        device: computes the hashes, of one tensor at a time, which are copied to the host at once.
    """
    folded = [_folded(_as_int64(x.to(device))) for x in tensors.values()]
    values = torch.stack(folded).tolist() if folded else []
    found = {}
    for (name, x), value in zip(tensors.items(), values, strict=True):
        frozen = "" if x.requires_grad else "frozen "
        found[name] = f"{frozen}{value % 2**64:016x}"
    return found


_ROW = 4096
_CHUNK = {"cuda": 1 << 25}
"""Numbers that are multiplied at once; on other devices 1 << 17, which fits a CPU's cache."""


def _as_int64(x: Tensor) -> Tensor:
    """Return a tensor's memory as int64, filled up with zeros at the end."""
    # Bits and not values: a NaN must equal itself, and -0 differ from 0.
    data = x.detach().contiguous().flatten().view(torch.uint8)
    # A view as int64 needs an aligned start; padding makes a copy that has one.
    if len(data) % 8 or data.storage_offset() % 8:
        data = F.pad(data, (0, -len(data) % 8))
    return data.view(torch.int64)


def _folded(words: Tensor) -> Tensor:
    """Return one int64, a tensor [], that depends on all numbers of an int64 tensor.

    The numbers are arranged in rows of length _ROW. Column i is multiplied by the i-th odd number
    of `_odd`, and each row is summed. The sums are treated in the same way, until one number is
    left.

    Args:
        words: the int64 tensor.
    """
    while len(words) > 1:
        rows = []
        for part in torch.split(words, _CHUNK.get(words.device.type, 1 << 17)):
            if len(part) % _ROW:
                part = F.pad(part, (0, -len(part) % _ROW))
            # Modulo 2^64 a product with an odd number can be undone: a changed word always changes
            # it.
            mixed = part.view(-1, _ROW) * _odd(words.device)
            # Upper bits are mixed into lower ones: two flipped signs would cancel otherwise.
            rows.append(mixed.bitwise_xor_(mixed >> 31).sum(1))
        words = torch.cat(rows)
    return words.sum()


@cache
def _odd(device: torch.device) -> Tensor:
    """Return _ROW odd numbers, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (_ROW,), generator=generator)
    return (2 * drawn + 1).to(device)
