"""Operations that make one of our tensors from those in a Hugging Face model, with inverses.

Ours have Megatron's orders: QKV rows by query group, gate above up, experts in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megapipe.config import ModelConfig


class Layout:
    """One tensor of megapipe that is equal to one tensor of Hugging Face.

    Subclasses convert tensors that are not equal. `join` makes megapipe's tensor from the Hugging
    Face tensors named by `parts`, and `split` does the inverse. A weight and its bias have the same
    operation. An arrow in a docstring goes from Hugging Face's shape to megapipe's, as `join` does.

    Args:
        names: Hugging Face's names, without .weight or .bias. {e} stands for an expert's number.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def parts(self, model: ModelConfig) -> list[str]:
        """Return Hugging Face's names of the tensors that `join` takes and `split` returns."""
        return list(self.names)

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """Return megapipe's tensor.

        Args:
            parts: Hugging Face's tensors, in the order of the names from `self.parts`.
            model: the configuration of the tensor's layer.
        """
        return parts[0]

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        """Return Hugging Face's tensors for one of megapipe's: the inverse of `join`.

        Args:
            tensor: megapipe's tensor.
            model: the configuration of the tensor's layer.
        """
        return (tensor,)


class Turned(Layout):
    """A weight that Hugging Face keeps transposed: its [in, out] -> megapipe's [out, in]."""

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        # A bias has one dimension, and stays.
        return parts[0].t()

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        return (tensor.t(),)


class Stack(Layout):
    """Gate and up of an MLP: Hugging Face's two tensors [f, h] -> megapipe's [2, f, h]."""

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return torch.stack(list(parts))

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        return tensor.unbind(0)


class Halves(Layout):
    """Gate and up of an MLP: Hugging Face's [2f, h], gate first -> megapipe's [2, f, h]."""

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return parts[0].view(2, -1, *parts[0].shape[1:])

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        return (tensor.flatten(0, 1),)


class ExpertHalves(Layout):
    """Gate and up of all experts: Hugging Face's [E, 2f, h] -> megapipe's [E, 2, f, h]."""

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        stacked = parts[0]
        return stacked.view(len(stacked), 2, -1, stacked.shape[-1])

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        return (tensor.flatten(1, 2),)


class OfNorms(Layout):
    """A tensor with one of the two names in `names`, depending on the model.

    The tensor has the first name if attention and MLP are parallel, each with its own norm; else
    the second.
    """

    def parts(self, model: ModelConfig) -> list[str]:
        return [self.names[model.parallel_attention_mlp != "two_norms"]]


class Row(Layout):
    """A vector [E] that Hugging Face keeps as the one row of a matrix [1, E]."""

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return parts[0].flatten()

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        return (tensor[None],)


class Rows(Layout):
    """Queries, keys and values: three Hugging Face tensors, or one with q, k, v in sequence.

    megapipe's one tensor has the rows of each query group together: queries, key, value.
    A layer whose keys are also its values has no third part, and no third tensor.
    """

    def parts(self, model: ModelConfig) -> list[str]:
        return list(self.names[:2] if model.keys_as_values else self.names)

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        groups = model.query_groups
        # A cut of the fused rows by group is what tensor parallelism needs.
        if len(parts) == 1:
            parts = torch.split(parts[0], _rows(model))
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        groups = model.query_groups
        sizes = [rows // groups for rows in _rows(model)]
        grouped = torch.split(tensor.view(groups, -1, *tensor.shape[1:]), sizes, dim=1)
        parts = [part.flatten(0, 1) for part in grouped]
        return parts if len(self.names) > 1 else (torch.cat(parts),)


class GatedRows(Rows):
    """Queries with gates, keys and values: three Hugging Face tensors.

    Hugging Face's first tensor has, head after head, a query and the gate of that head. megapipe's
    one tensor has, for each query group: all queries, all gates, the key, the value.
    """

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        groups = model.query_groups
        each = model.heads // groups
        first, *rest = parts
        pairs = first.view(groups, each, 2, model.head_dim, *first.shape[1:])
        others = [part.view(groups, -1, *part.shape[1:]) for part in rest]
        return torch.cat((pairs.transpose(1, 2).flatten(1, 3), *others), 1).flatten(0, 1)

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        groups = model.query_groups
        each = model.heads // groups
        head = model.head_dim
        rows = tensor.view(groups, -1, *tensor.shape[1:])
        first, *rest = torch.split(rows, [2 * each * head, head, head], 1)
        pairs = torch.unflatten(first, 1, (2, each, head)).transpose(1, 2)
        return pairs.flatten(0, 3), *(part.flatten(0, 1) for part in rest)


class KeyHeads(Layout):
    """The rows of a gated delta net's projection, by key head: several Hugging Face tensors.

    Each Hugging Face tensor has one or several matrices, one after the other, and each matrix has
    the rows of all key heads. megapipe's one tensor has, for each key head, the head's rows of all
    these matrices.

    `matrices` takes a layer's configuration, and returns a list for each Hugging Face tensor: the
    number of rows of each matrix in it.
    """

    def __init__(
        self, *names: str, matrices: Callable[[ModelConfig], Sequence[Sequence[int]]]
    ) -> None:
        super().__init__(*names)
        self.matrices = matrices

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        heads = model.linear_num_key_heads
        found = []
        for part, sizes in zip(parts, self.matrices(model), strict=True):
            for matrix in torch.split(part, list(sizes)):
                found.append(matrix.reshape(heads, -1, *matrix.shape[1:]))
        return torch.cat(found, 1).flatten(0, 1)

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        heads = model.linear_num_key_heads
        rows = tensor.view(heads, -1, *tensor.shape[1:])
        found = []
        begin = 0
        for sizes in self.matrices(model):
            matrices = []
            for size in sizes:
                end = begin + size // heads
                matrices.append(rows[:, begin:end].flatten(0, 1))
                begin = end
            found.append(torch.cat(matrices))
        return found


class Taps(KeyHeads):
    """The taps of a gated delta net's convolution, by key head.

    Hugging Face's [channels, 1, taps] -> megapipe's [key heads, channels / key heads, taps].
    """

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        taps = super().join([parts[0][:, 0]], model)
        return taps.view(model.linear_num_key_heads, -1, taps.shape[-1])

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        (taps,) = super().split(tensor.flatten(0, 1), model)
        return (taps[:, None],)


def _rows(model: ModelConfig) -> list[int]:
    """Return [rows of queries, rows of keys, rows of values], without values that are keys."""
    keys = model.query_groups * model.head_dim
    return [model.heads * model.head_dim, *[keys] * model.projected]


class TurnedRows(Rows):
    """Queries, keys and values of GPT-2's c_attn, which is kept transposed, as [h, 3h]."""

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return super().join([parts[0].t()], model)

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        return (super().split(tensor, model)[0].t(),)


class Experts(Layout):
    """The experts of a layer: Hugging Face's matrix [f, h] of each -> megapipe's [E, f, h].

    If each expert has two matrices, gate and up, megapipe's tensor is [E, 2, f, h].
    """

    def parts(self, model: ModelConfig) -> list[str]:
        # Gate and up of one expert follow each other, so that a view has both.
        numbers = range(model.experts)
        return [name.format(e=number) for number in numbers for name in self.names]

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        each = len(self.names)
        stacked = torch.stack(list(parts))
        return stacked.view(-1, each, *stacked.shape[1:]) if each > 1 else stacked

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        if len(self.names) > 1:
            tensor = tensor.flatten(0, 1)
        return tensor.unbind(0)


class TurnedHalves(ExpertHalves):
    """Gate and up of all experts: Hugging Face's transposed [E, h, 2f] -> our own [E, 2, f, h]."""

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return super().join([parts[0].transpose(1, 2).contiguous()], model)

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        return (super().split(tensor, model)[0].transpose(1, 2),)


class Alternating(Layout):
    """Gate and up of all experts in one tensor, with columns gate, up, gate, up, and so on.

    Hugging Face's weight [E, h, 2f] -> megapipe's [E, 2, f, h], a bias [E, 2f] -> [E, 2, f].
    """

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        rows = parts[0].transpose(1, -1)
        return rows.reshape(len(rows), -1, 2, *rows.shape[2:]).transpose(1, 2)

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        rows = tensor.transpose(1, 2).flatten(1, 2)
        return (rows.transpose(1, -1),)


class TurnedExperts(Layout):
    """The last matrix of all experts: Hugging Face's transposed [E, f, h] -> our own [E, h, f]."""

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        return parts[0].transpose(1, 2)

    def split(self, tensor: Tensor, model: ModelConfig) -> Sequence[Tensor]:
        return (tensor.transpose(1, 2),)
