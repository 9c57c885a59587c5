"""List the parameters of a pipeline and the rank of each.

A parameter is on one rank or, under DualPipe, on two ranks that mirror each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from megapipe.distributed.layout import layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError


class ParameterRow(NamedTuple):
    """One parameter on one rank: a row of the list of all parameters.

    Attributes:
        name: name of the parameter in the whole model.
        rank: the pipeline rank.
        stage: position of the parameter's stage among the stages of that rank.
        shape: shape of the full parameter, before tensor parallelism splits it.
        tied_to: name of the parameter whose weight this one repeats, such as a tied head; or None.
        dtype: the parameter's type as text.
        trained: whether the parameter has a gradient.
        received: the parameter repeats a tied weight, and only the rank of the original parameter
            has the optimizer state and sends updates.
        local: shape of the rank's slice.
    """

    name: str
    rank: int
    stage: int
    shape: list[int]
    tied_to: str | None
    dtype: str
    trained: bool
    received: bool
    local: list[int]


class Census(NamedTuple):
    """A list of every parameter of the pipeline, by name.

    `order` numbers the parameters of the whole model.

    Attributes:
        owners: {name: row of the parameter on the rank that has its optimizer state}.
        twins: {name: row of the parameter's replica on another rank}; {} unless under DualPipe.
    """

    owners: Mapping[str, ParameterRow]
    twins: Mapping[str, ParameterRow]

    @property
    def order(self) -> dict[str, int]:
        """The position of each parameter in one order of the whole model: {name: position}.

        Tied parameters have none.
        """
        # By name, so that the order is equal under every layout and norms add up in it.
        names = [row.name for row in self.owners.values() if row.tied_to is None]
        return {name: n for n, name in enumerate(sorted(names, key=natural))}


def take_census(stages: Sequence[nn.Module], mesh: ProcessMesh) -> Census:
    """Collect a list of the parameters on all ranks of the pipeline. Collective over the pipeline.

    Of a parameter's two replicas under DualPipe, the owner is the one in the first copy of the
    model.

    Args:
        stages: this rank's stages in ascending order.
    Raises: ConfigError, the same on all ranks, for names that occur twice without being replicas,
        for impossible ties, and for parameters of several types.
    """
    own = []
    for number, stage in enumerate(stages):
        for name, param in stage.named_parameters():
            layout = layout_of(param)
            row = ParameterRow(
                name,
                mesh.pp.rank,
                number,
                list(layout.full),
                layout.tied_to,
                str(param.dtype),
                param.requires_grad,
                layout.received,
                list(param.shape),
            )
            own.append(row)
    # All problems are found on all ranks from equal data, so that all raise the same error.
    everyone = mesh.pp.gather_json((own, mesh.ends.size > 1, mesh.twins.size > 1))
    rows, with_ends, with_twins = zip(*everyone, strict=True)
    problems: list[str] = []
    owners: dict[str, ParameterRow] = {}
    twins: dict[str, ParameterRow] = {}
    for row in (ParameterRow(*row) for rank in rows for row in rank):
        # The first row of a name stays; a second one must be its replica on the mirrored rank.
        other = owners.setdefault(row.name, row)
        if other is row:
            continue
        is_mirror = any(with_twins) and _mirrored(other, row, mesh.pp.size)
        if row.name in twins or not is_mirror:
            problems.append(
                f"parameter {row.name} exists on pipeline ranks {other.rank} and {row.rank}; "
                "a stage must name its layers by their number in the whole model"
            )
        # The second chain of DualPipe runs the ranks in reverse and uses each rank's later stage.
        owners[row.name], twins[row.name] = sorted((other, row), key=lambda row: row.stage)
    for row in owners.values():
        if row.tied_to is not None:
            problems += _tie_problems(row, owners.get(row.tied_to), with_ends, twins)
    # One parameter of each type is enough to find the module.
    examples = {row.dtype: row.name for row in owners.values()}
    if len(examples) > 1:
        listed = [f"{n} is {dtype.removeprefix('torch.')}" for dtype, n in sorted(examples.items())]
        problems.append(
            f"the parameters of a model must have one type, and {', '.join(listed)}. "
            "Make them so in the model provider, or give --bf16 or --fp16, which convert all of "
            "them"
        )
    if problems:
        raise ConfigError(problems)
    return Census(owners, twins)


def trained(stage: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) for the parameters of a stage that are trained.

    A frozen parameter (requires_grad False) has no gradient, no optimizer state and no decay.
    """
    return [(name, param) for name, param in stage.named_parameters() if param.requires_grad]


def frozen(
    stages: Sequence[nn.Module], census: Mapping[str, ParameterRow], mesh: ProcessMesh
) -> list[nn.Parameter] | None:
    """Return the frozen parameters that this rank adds to sums over the model, such as norms.

    Where several ranks of a pipeline or a tensor-parallel group have the same slice of a parameter,
    only one returns it. The result is None if the whole model is trained.

    Args:
        stages: this rank's stages in ascending order.
        census: {name: the row of the parameter's owner}.
    """
    if all(row.trained for row in census.values()):
        return None
    found = []
    for stage in stages:
        for name, param in stage.named_parameters():
            row = census[name]
            is_owner = row.rank == mesh.pp.rank and row.tied_to is None
            if not param.requires_grad and is_owner and layout_of(param).is_first(mesh.tp):
                found.append(param)
    return found


def check_trained(census: Mapping[str, ParameterRow]) -> None:
    """Raise ConfigError if no parameter is trained. `census` is {name of a parameter: its row}."""
    if not any(row.trained for row in census.values()):
        raise ConfigError(
            "nothing is trained: every parameter of the model has requires_grad False. Leave some "
            "trained in the model provider, or run forwards alone with --freeze-all-layers"
        )


def _mirrored(a: ParameterRow, b: ParameterRow, pp: int) -> bool:
    """Return whether the rows a and b are DualPipe's replicas of one parameter.

    Replicas have equal rows, on mirrored ranks and in the two copies of the model. `pp` is the
    number of pipeline ranks.
    """
    # Rows from `shape` on are equal: only the rank and the stage may differ.
    is_mirror = a.rank != b.rank and a.rank + b.rank == pp - 1
    return is_mirror and a.stage != b.stage and a[3:] == b[3:]


def _tie_problems(
    user: ParameterRow,
    owner: ParameterRow | None,
    with_ends: Sequence[bool],
    twins: Mapping[str, ParameterRow],
) -> list[str]:
    """Return the reasons why a parameter cannot repeat a weight; [] if it can.

    Args:
        user: the parameter that repeats a weight, such as a tied head.
        owner: the parameter with that weight; None if it does not exist.
        with_ends: with_ends[r] says whether pipeline rank r is in the group `ProcessMesh.ends`.
        twins: {name of a parameter: its replica on another rank, under DualPipe}.
    """
    if owner is None or owner.tied_to is not None:
        return [f"parameter {user.name} is tied to {user.tied_to}, which no stage owns"]
    if owner.shape != user.shape:
        return [
            f"parameter {user.name} {user.shape} is tied to {owner.name} {owner.shape}: "
            "the shapes differ"
        ]
    # One of both would change in a step and the other would not.
    if owner.trained != user.trained:
        frozen, other = (user, owner) if owner.trained else (owner, user)
        return [
            f"parameter {frozen.name} is frozen and tied to {other.name}, which is not: freeze "
            "both or none"
        ]
    if owner.rank == user.rank:
        return []
    # A tied head is on the last rank, its embedding on the first. Only received weights may be
    # anywhere.
    last = len(with_ends) - 1
    if not user.received and {owner.rank, user.rank} != {0, last}:
        return [
            f"parameter {user.name} on pipeline rank {user.rank} is tied to {owner.name} on rank "
            f"{owner.rank}; they must share a rank or be on the first and the last, 0 and {last}"
        ]
    have_group = with_ends[owner.rank] and with_ends[user.rank]
    # Under DualPipe the mirrored rank has the owner's replica, so the tie needs no group.
    if not have_group and owner.name not in twins:
        return [
            f"parameter {user.name} is tied to {owner.name} on another pipeline rank, and "
            "--untie-embeddings-and-output-weights says that none is. Leave the flag out, or the "
            "tie"
        ]
    return []


def natural(name: str) -> list[str | int]:
    """Return a sort key for names, by which layer 2 comes before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
