"""Describe how a parameter is split over the ranks of a stage, and its name in the full model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import Axis


@dataclass(frozen=True)
class Layout:
    """The split of a parameter over tensor and expert parallelism, and its initial values.

    `local` returns the shape of a rank's slice, and `mine` the slice. `splits` and `pieces` say
    which axes split the parameter.

    Attributes:
        full: shape of the unsplit parameter, in which it is saved. Over t tensor-parallel ranks, a
            rank's tensor is a slice of it, with size full[dim] / t in dimension `dim`.
        dim: dimension of `full` that tensor parallelism splits; None if every rank has all of it.
        tied_to: global name of the parameter whose weight this one repeats, as a tied output head
            does; None for a parameter with its own weight.
        mean: mean of the initial weight.
        log_of: two numbers; the initial values are logarithms of numbers drawn between them. None
            for the distribution of `mean` and `std`.
        std: standard deviation of the initial weight, which is normally distributed. None: uniform
            within sqrt(6 / (inputs + outputs)) of the mean (Glorot and Bengio 2010). The inputs are
            the last dimension of `full`, the outputs all others.
        sum_over_tp: the gradients must be summed over tp. Every tensor-parallel rank has the full
            parameter, but uses it only on its heads or its part of the sequence.
        part: (k, n) if this is part k = 0..n-1 of n equal parts in `dim`, with one part on each of
            n pipeline ranks. Tensor parallelism splits the part further. The name of such a
            parameter ends in [k/n].
        fused: for a weight that interleaves the rows of several matrices, how many rows of each
            follow each other. (4, 1, 1): 4 of the query, 1 of the key, 1 of the value, then 4 of
            the query again. () for a single matrix.
        experts: whether the first dimension of `full` counts experts, which expert parallelism
            splits. Expert tensor parallelism then splits `dim`. Each expert is initialised by
            itself.
        received: this is a tied weight, and only the rank of its owner has optimizer state. The
            owner sends the weight after each update. Otherwise each rank updates its replica.
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
    received: bool = False
    log_of: tuple[float, float] | None = None

    @property
    def splits(self) -> dict[int, str]:
        """The axes that split the parameter: {dimension of `full`: "tp", "etp" or "ep"}."""
        found = {}
        if self.experts:
            found[0] = "ep"
        if self.dim is not None:
            found[self.dim] = "etp" if self.experts else "tp"
        return found

    def pieces(self, tp: Axis) -> dict[int, tuple[int, int]]:
        """Return {split dimension of `full`: (i, n)}: this rank has piece i of n equal ones.

        Args:
            tp: the tensor-parallel axis, from which `named` gives the experts' axes.
        """
        found = {}
        # Ranks along the axis split each of the n parts.
        k, n = self.part
        for dim, name in self.splits.items():
            axis = tp.named(name)
            found[dim] = (k * axis.size + axis.rank, n * axis.size)
        return found

    def local(self, tp: Axis) -> tuple[int, ...]:
        """Return the shape of a rank's slice, with as many dimensions as `full`.

        Args:
            tp: the tensor-parallel axis.
        """
        # Split sizes divide evenly; checks of the configuration have refused all others.
        shape = list(self.full)
        for dim, (_, pieces) in self.pieces(tp).items():
            shape[dim] //= pieces
        return tuple(shape)

    def mine(self, whole: Tensor, tp: Axis) -> Tensor:
        """Return this rank's slice of a parameter, as a view of `whole`, or `whole` itself.

        Args:
            whole: the parameter in the shape `full`, or one expert of it.
            tp: the tensor-parallel axis.
        """
        for dim, (piece, pieces) in self.pieces(tp).items():
            # For a single expert, dimension 0 is smaller than in `full` and is not split.
            if whole.shape[dim] == self.full[dim]:
                whole = whole.chunk(pieces, dim)[piece]
        return whole

    def is_first(self, tp: Axis) -> bool:
        """Return whether this rank is the first one along tp, or etp, that has its slice.

        The result is False if an earlier rank has the same slice, so that each slice counts once.
        """
        # If an axis splits the parameter, no other rank along it has this slice.
        name = "etp" if self.experts else "tp"
        return self.dim is not None or tp.named(name).rank == 0


def whole_name(name: str) -> str:
    """Return a parameter's name without the number of its part: weight for weight[1/4]."""
    return name.partition("[")[0]


def parameter(layout: Layout, *shape: int) -> nn.Parameter:
    """Return a parameter with its layout and without values.

    Args:
        shape: the shape of this rank's slice; none for all of `layout.full`.
    """
    return set_layout(nn.Parameter(torch.empty(shape or layout.full)), layout)


def set_layout(param: nn.Parameter, layout: Layout) -> nn.Parameter:
    """Attach a layout to a parameter and return the parameter.

    The attributes by which Megatron's code recognises a split parameter are set too.
    """
    dim, stride = _partition(tuple(param.shape), layout)
    attributes = {
        "mesh_layout": layout,
        "tensor_model_parallel": dim >= 0,
        "partition_dim": dim,
        "partition_stride": stride,
    }
    # Megatron's mark of a parameter that is not reduced over the ranks of the dense grid.
    if layout.experts:
        attributes["allreduce"] = False
    # In a loop, as the type of a Parameter has none of these attributes.
    for name, value in attributes.items():
        setattr(param, name, value)
    return param


def _partition(local: tuple[int, ...], layout: Layout) -> tuple[int, int]:
    """Return Megatron's (partition_dim, partition_stride) of a local tensor.

    The first is the dimension of the local tensor that is split, or -1. The second is the number of
    equal blocks in that dimension that are split separately: 2 for [gate; up], else mostly 1.

    Args:
        local: shape of the local tensor.
        layout: the split of the parameter.
    """
    if layout.dim is None:
        return -1, 1
    dim = layout.dim
    if len(local) != len(layout.full):
        # Find the dimension of the local tensor that covers `dim` of `full`.
        after = prod(layout.full[layout.dim + 1 :])
        dim = next((d for d in reversed(range(len(local))) if prod(local[d:]) > after), 0)
    before = layout.full[: layout.dim]
    if layout.experts:
        before = (local[0], *layout.full[1 : layout.dim])
    # Elements of a piece, at one index of the dimensions before it.
    piece = prod(local) // max(prod(before), 1)
    return dim, max(prod(local[dim:]) // max(piece, 1), 1)


def layout_of(param: Tensor) -> Layout:
    """Return the layout of a parameter; without one, every rank has the full parameter."""
    return getattr(param, "mesh_layout", Layout(tuple(param.shape)))


SAVED_BUFFERS = ("expert_bias", "xielu_beta", "xielu_eps", "layer_scalar")
"""Names of buffers that checkpoints hold: training changes them without a gradient, or a model from
elsewhere has brought them.

They are equal on all ranks of a stage.
"""


def saved_tensors(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for a stage's parameters and saved buffers, for checkpoints.

    A buffer is saved if the last part of its name is in SAVED_BUFFERS. `histories` yields further
    buffers of a checkpoint.
    """
    yield from stage.named_parameters()
    for name, x in stage.named_buffers():
        if name.rpartition(".")[2] in SAVED_BUFFERS:
            yield name, x


HISTORY = ".amax_history"
"""End of the name of the buffers that delayed FP8 scaling remembers the largest values in.

A run loads them where a checkpoint has them, and otherwise starts with empty ones.
"""


def histories(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) for the histories of largest values that delayed FP8 scaling keeps.

    All ranks of the stage have equal histories.
    """
    for name, x in stage.named_buffers():
        if name.endswith(HISTORY):
            yield name, x


def untrained(stage: nn.Module) -> list[Tensor]:
    """Return the tensors of a stage that a checkpoint has and no optimizer updates.

    These are frozen weights, buffers in SAVED_BUFFERS and the histories of FP8.
    """
    return [x for _, x in (*saved_tensors(stage), *histories(stage)) if not x.requires_grad]
