"""A census of the parameters of a pipeline: each is on one rank or, under DualPipe, on two that mirror each other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from megapipe.distributed.layout import layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError


class Row(NamedTuple):
    """One parameter on one rank. `stage` counts the stages of its rank; `lent` as in Layout, `local` is its shape."""

    name: str
    rank: int
    stage: int
    shape: list[int]
    tied_to: str | None
    dtype: str
    trained: bool
    lent: bool
    local: list[int]


class Census(NamedTuple):
    """Every parameter of the pipeline by name.

    Attributes:
        owners: where its state lives.
        twins: its replica, if there is one.
    """

    owners: Mapping[str, Row]
    twins: Mapping[str, Row]

    @property
    def order(self) -> dict[str, int]:
        """Place of each parameter in one order of the whole model; of tied ones the owner alone has a place."""
        names = (row.name for row in self.owners.values() if row.tied_to is None)
        return {name: n for n, name in enumerate(sorted(names, key=natural))}


def take_census(stages: Sequence[nn.Module], mesh: ProcessMesh) -> Census:
    """Ask all ranks of the pipeline. Of twins the one whose stage is of the first chain, the earlier on its rank, owns.

    Raises: ConfigError, the same on all ranks, for names that occur twice otherwise, ties that cannot be kept,
        and parameters of several types.
    """
    mine = [
        Row(name, mesh.pp.rank, number, list(layout.full), layout.tied_to, str(param.dtype), *rest)
        for number, stage in enumerate(stages)
        for name, param in stage.named_parameters()
        for layout in [layout_of(param)]
        for rest in [(param.requires_grad, layout.received, list(param.shape))]
    ]
    rows, with_ends, with_twins = zip(
        *mesh.pp.gather_json((mine, mesh.ends.size > 1, mesh.twins.size > 1)), strict=True
    )
    problems: list[str] = []
    owners: dict[str, Row] = {}
    twins: dict[str, Row] = {}
    for row in (Row(*row) for rank in rows for row in rank):
        other = owners.setdefault(row.name, row)
        if other is row:
            continue
        if row.name in twins or not (any(with_twins) and _mirrored(other, row, mesh.pp.size)):
            problems.append(
                f"parameter {row.name} exists on pipeline ranks {other.rank} and {row.rank}; "
                "a stage must name its layers by their number in the whole model"
            )
        owners[row.name], twins[row.name] = sorted((other, row), key=lambda row: row.stage)
    for row in owners.values():
        if row.tied_to is not None:
            problems += _tie_problems(row, owners.get(row.tied_to), with_ends, twins)
    if len(examples := {row.dtype: row.name for row in owners.values()}) > 1:
        found = ", ".join(f"{name} is {dtype.removeprefix('torch.')}" for dtype, name in sorted(examples.items()))
        problems.append(
            f"the parameters of a model must have one type, and {found}. "
            "Make them so in the model provider, or give --bf16 or --fp16, which convert all of them"
        )
    if problems:
        raise ConfigError(problems)
    return Census(owners, twins)


def trained(stage: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A frozen parameter (requires_grad False) has no gradient, no state and no decay: it stays where it is."""
    return [(name, param) for name, param in stage.named_parameters() if param.requires_grad]


def frozen(stages: Sequence[nn.Module], census: Mapping[str, Row], mesh: ProcessMesh) -> list[nn.Parameter] | None:
    """Frozen parameters that count on this rank, so that each element of the model counts on one of a pipeline; None
    if the whole model is trained."""
    if all(row.trained for row in census.values()):
        return None
    params = {name: param for stage in stages for name, param in stage.named_parameters() if not param.requires_grad}
    here = [name for name in params if census[name].rank == mesh.pp.rank and census[name].tied_to is None]
    return [params[name] for name in here if layout_of(params[name]).is_first(mesh.tp)]


def check_trained(census: Mapping[str, Row]) -> None:
    """Raises: ConfigError if the whole model is frozen."""
    if not any(row.trained for row in census.values()):
        raise ConfigError(
            "nothing is trained: every parameter of the model has requires_grad False. Leave some trained in the "
            "model provider, or run forwards alone with --freeze-all-layers"
        )


def _mirrored(a: Row, b: Row, pp: int) -> bool:
    """Are these DualPipe's replicas: mirrored ranks, different chains?"""
    return a.rank != b.rank and a.rank + b.rank == pp - 1 and a.stage != b.stage and a[3:] == b[3:]


def _tie_problems(user: Row, owner: Row | None, with_ends: Sequence[bool], twins: Mapping[str, Row]) -> list[str]:
    if owner is None or owner.tied_to is not None:
        return [f"parameter {user.name} is tied to {user.tied_to}, which no stage owns"]
    if owner.shape != user.shape:
        return [f"parameter {user.name} {user.shape} is tied to {owner.name} {owner.shape}: the shapes differ"]
    if owner.trained != user.trained:
        frozen, other = (user, owner) if owner.trained else (owner, user)
        return [f"parameter {frozen.name} is frozen and tied to {other.name}, which is not: freeze both or none"]
    apart, last = owner.rank != user.rank, len(with_ends) - 1
    if apart and not user.lent and {owner.rank, user.rank} != {0, last}:
        return [
            f"parameter {user.name} on pipeline rank {user.rank} is tied to {owner.name} on rank {owner.rank}; "
            f"they must share a rank or be on the first and the last, 0 and {last}"
        ]
    if apart and not (with_ends[owner.rank] and with_ends[user.rank]) and owner.name not in twins:
        return [
            f"parameter {user.name} is tied to {owner.name} on another pipeline rank, and "
            "--untie-embeddings-and-output-weights says that none is. Leave the flag out, or the tie"
        ]
    return []


def natural(name: str) -> list[str | int]:
    """Sort key with layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
