"""The layout of a parameter over the ranks of a stage, and its name in the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from megapipe.distributed.axis import Axis


@dataclass(frozen=True)
class Layout:
    """The layout of a parameter over the axes that split weights, and its name in the whole model.

    Attributes:
        full: shape in which the parameter is saved, the same under every layout. The local tensor, viewed as `full`
            with size full[dim] / t in dimension `dim`, is this rank's slice.
        dim: dimension of `full` that tensor parallelism splits; None if every rank holds all of it.
        tied_to: global name of the parameter whose weight this one repeats (a tied output head), else None.
        mean, std: the initial weight is mean + std x N(0, 1). std None: uniform within sqrt(6 / (inputs + outputs)) of
            the mean (Glorot and Bengio 2010), where the last dimension of `full` is the inputs, the others outputs.
        sum_over_tp: whole on every rank, but each sees a part of what it is used on (its heads, or its share of a
            sequence-parallel sequence), so that the gradients must be summed over tp.
        part: (k, n): this is the k-th of n equal parts in `dim`, which ranks of the pipeline share, and tp splits it
            further. Such a parameter's name ends in [k/n].
        fused: rows of each matrix in one group, where the rows of several matrices take turns in groups (query, key
            and value); empty for one matrix.
        experts: the first dimension of `full` counts experts, whose weights are drawn one by one: expert parallelism
            splits it, and expert tensor parallelism `dim`.
        lent: a tied weight without state of its own even where its owner is on another rank, which then sends it after
            each update; without this that rank updates a replica.
    """

    full: tuple[int, ...]
    dim: int | None = None
    tied_to: str | None = None
    mean: float = 0.0
    std: float | None = 0.0
    sum_over_tp: bool = False
    part: tuple[int, int] = (0, 1)
    fused: tuple[int, ...] = ()
    experts: bool = False
    lent: bool = False

    @property
    def splits(self) -> dict[int, str]:
        """Dimension of `full` -> the axis that splits it."""
        along = {} if self.dim is None else {self.dim: "etp" if self.experts else "tp"}
        return {0: "ep"} | along if self.experts else along

    def pieces(self, tp: Axis) -> dict[int, tuple[int, int]]:
        """Dimension of `full` -> (i, n): the local tensor is the i-th of n equal pieces there. tp: see Axis.beside."""
        axes = {dim: tp.named(name) for dim, name in self.splits.items()}
        (k, n) = self.part
        return {dim: (k * axis.size + axis.rank, n * axis.size) for dim, axis in axes.items()}

    def local(self, tp: Axis) -> tuple[int, ...]:
        """`full` with the dimensions that are split divided over parts and axes."""
        pieces = self.pieces(tp)
        return tuple(size // pieces[dim][1] if dim in pieces else size for dim, size in enumerate(self.full))

    def mine(self, whole: Tensor, tp: Axis) -> Tensor:
        """This rank's slice of a whole parameter; of a single expert's its slice of that."""
        for dim, (piece, pieces) in self.pieces(tp).items():
            if whole.shape[dim] == self.full[dim]:
                whole = whole.chunk(pieces, dim)[piece]
        return whole

    def is_first(self, tp: Axis) -> bool:
        """Is this the first of the ranks of a stage that have the same slice?"""
        return self.dim is not None or tp.named("etp" if self.experts else "tp").rank == 0


def whole_name(name: str) -> str:
    """The name in the whole model of a parameter of which there may be a part here."""
    return name.partition("[")[0]


def set_layout(param: nn.Parameter, layout: Layout) -> nn.Parameter:
    """Write down how a parameter is split, for code in Megatron's shape by its names too; returns it."""
    dim, stride = _partition(tuple(param.shape), layout)
    said = {"tensor_model_parallel": dim >= 0, "partition_dim": dim, "partition_stride": stride}
    said |= {"allreduce": False} if layout.experts else {}  # over the ranks of the dense grid
    for name, value in ({"mesh_layout": layout} | said).items():
        setattr(param, name, value)
    return param


def _partition(local: tuple[int, ...], layout: Layout) -> tuple[int, int]:
    """The dimension of a local tensor that is split, -1 for none, and how many pieces of the whole it has there:
    Megatron's partition_dim and partition_stride, whose whole has the local tensor's number of dimensions."""
    if layout.dim is None:
        return -1, 1
    dim, behind = layout.dim, prod(layout.full[layout.dim + 1 :])
    if len(local) != len(layout.full):
        dim = next((d for d in reversed(range(len(local))) if prod(local[d:]) > behind), 0)
    before = (local[0], *layout.full[1 : layout.dim]) if layout.experts else layout.full[: layout.dim]
    piece = prod(local) // max(prod(before), 1)  # elements at one place of the dimensions before
    return dim, max(prod(local[dim:]) // max(piece, 1), 1)


def layout_of(param: Tensor) -> Layout:
    """The layout of a parameter; one that says nothing is whole on every rank."""
    return getattr(param, "mesh_layout", Layout(tuple(param.shape)))


SAVED_BUFFERS = ("expert_bias",)
"""Buffers that training changes without a gradient: they are whole on every rank, and checkpoints have them."""


def saved_tensors(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A stage's parameters and those buffers, by name."""
    yield from stage.named_parameters()
    yield from ((name, x) for name, x in stage.named_buffers() if name.rpartition(".")[2] in SAVED_BUFFERS)


HISTORY = ".amax_history"
"""The end of the name of what delayed scaling remembers. A run loads it where it is, and else begins to remember."""


def histories(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Memories of a stage's delayed scaling, by name: whole on every rank."""
    return ((name, x) for name, x in stage.named_buffers() if name.endswith(HISTORY))
