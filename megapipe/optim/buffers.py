"""Store the parameters and gradients of a stage, or of a bucket of its layers, in flat tensors.

One all-reduce, one fused update and one copy then serve all parameters.

    grads    [ ends | decayed | not decayed | borrowed ]    float32 (float64 for a float64 model)
    main     [ ends | decayed | not decayed ]               as grads; what the optimizer updates
    model    [ ends | decayed | not decayed ]               what the layers compute with

--main-grads-dtype and --main-params-dtype make grads and main bf16. `model` is the same memory as
`main` unless its type differs. The ends are word embeddings and output head, which may have their
own learning rate; they are decayed too. Borrowed parameters use the memory of another parameter.
Parameters with other rates or decay (rule.Group) form further sections.

Under ZeRO-1 (Rajbhandari et al. 2020, sec. 5) all but the borrowed parameters are padded to equal
shares, one for each data-parallel rank. `main` holds this rank's share alone. Its gradients are
reduced there, and `model` is gathered from all shares.

Every parameter starts at a multiple of 64 elements and is padded with zeros. A vectorised kernel
then has no remainder to compute differently: a parameter's result does not depend on its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megapipe.distributed.axis import ALONE, CPU, Axis
from megapipe.distributed.device import Gauge
from megapipe.distributed.layout import layout_of
from megapipe.optim.rule import Group, Groups, usual_groups
from megapipe.optim.sharded.passing import Passing, separate, start_filling

ALIGN = 64


class Section(NamedTuple):
    """Neighbouring parameters in a flat tensor that have equal learning rate and weight decay.

    Attributes:
        group: the parameters' factors on the run's learning rate and weight decay.
        at_end: whether the parameters are word embeddings or output head, which may have their own
            rate.
        names: names of the parameters.
        where: the range of the parameters' elements in a flat tensor, or in this rank's share of
            the tensor.
    """

    group: Group
    at_end: bool
    names: tuple[str, ...]
    where: slice


class Positions(NamedTuple):
    """The places of parameters in flat tensors.

    Attributes:
        of: {name of a parameter: (its first element, its shape)}.
        sections: the parameters before `owned`, grouped by learning rate and weight decay.
        owned: number of elements before the borrowed parameters, which use another parameter's
            memory. It is a multiple of 64 times the number of ZeRO-1 ranks, which get equal shares.
        end: number of all elements.
    """

    of: dict[str, tuple[int, torch.Size]]
    sections: list[Section]
    owned: int
    end: int


def positions(
    params: Mapping[str, nn.Parameter], borrowed: Collection[str], shares: int, groups: Groups
) -> Positions:
    """Return the places of parameters in flat tensors.

    Parameters with equal rates are next to each other, so that an update works on few long tensors
    instead of many short ones.

    Args:
        params: {name: parameter}.
        borrowed: names of parameters that use another parameter's memory.
        shares: number of ranks over which ZeRO-1 divides the tensors.
        groups: gives each parameter's factors on learning rate and weight decay.
    """
    members: dict[tuple[bool, Group], list[str]] = {}
    for name, param in params.items():
        if name not in borrowed:
            key = (_at_an_end(param), groups(name, param.shape))
            members.setdefault(key, []).append(name)
    of: dict[str, tuple[int, torch.Size]] = {}

    def place(names: Iterable[str], start: int) -> int:
        for name in names:
            of[name] = (start, params[name].shape)
            start += -(-params[name].numel() // ALIGN) * ALIGN
        return start

    # The ends first, then sections by falling weight decay and rising learning rate.
    order = sorted(members, key=lambda key: (not key[0], -key[1].weight_decay, key[1].lr))
    sections = list[Section]()
    end = 0
    for at_end, group in order:
        names = members[at_end, group]
        start = end
        end = place(names, start)
        sections.append(Section(group, at_end, tuple(names), slice(start, end)))
    # A share, too, begins at a multiple of ALIGN.
    owned = end + -end % (ALIGN * shares)
    # After all shares: the owner's update writes their memory.
    last = place((name for name in params if name in borrowed), owned)
    return Positions(of, sections, owned, last)


class FlatBuffers:
    """The flat tensors of one stage or bucket: weights, gradients and main parameters.

    The tensors are `model` (weights), `grads` and `main` (main parameters). The parameters become
    views of `model`, and get `main_grad`, a view of `grads`. `start_reduce` and `start_gather`
    start collectives on these tensors, and `view` returns the part of one parameter.

    Args:
        params: {name: parameter}, all of one floating dtype on one device. Without any, buffers
            still take part in collectives.
        borrowed: names of parameters that use another parameter's memory, such as a tied head whose
            embedding is on this rank. Only their gradients are stored here.
        has_main: False for a replica, whose main parameters are on another rank; `main` is then
            `model`.
        device: the device of the buffers, to which weights that wait on the host are copied. None
            for the parameters' own device.
        replicas: the ranks with equal parameters, over which gradients are summed.
        distributed: split `main` over the replicas (ZeRO-1).
        groups: gives each parameter's factors on learning rate and weight decay.
        grads_as: dtype of `grads`, if not the usual one.
        main_as: dtype of `main`, if not the usual one.
        drops: `model` has memory only from its gathering until `drop`.
        live: counts the bytes that are allocated and released within a step.

    Attributes:
        share: the range of elements of `grads` and `model` that this rank updates: 1/n of them
            under ZeRO-1 over n ranks, else all. `main` has these elements only.
        sections: the parameters by learning rate and weight decay, with their elements in `share`.
        own: names of the parameters that are not borrowed.
        names: names of all parameters.
        shard: the weights in `share`, also while `model` has no memory.
        rounds: whether `main` has another type than `model`, to which it must be rounded.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        borrowed: Collection[str] = (),
        *,
        has_main: bool = True,
        device: torch.device | None = None,
        replicas: Axis = ALONE,
        distributed: bool = False,
        groups: Groups = usual_groups,
        grads_as: torch.dtype | None = None,
        main_as: torch.dtype | None = None,
        drops: bool = False,
        live: Gauge | None = None,
    ) -> None:
        dtypes = {p.dtype for p in params.values()}
        assert len(dtypes) <= 1, f"one dtype per stage, got {sorted(map(str, dtypes))}"
        self.replicas = replicas
        self.shares = shares = replicas if distributed else ALONE
        placed = positions(params, borrowed, shares.size, groups)
        # Shares are equal in size and may begin or end within a parameter.
        size = placed.owned // shares.size
        self._where = placed.of
        self.share = slice(shares.rank * size, (shares.rank + 1) * size)
        self.sections = []
        for section in placed.sections:
            where = self.within(section.where.start, section.where.stop)
            self.sections.append(section._replace(where=where))
        self.own = tuple(name for section in self.sections for name in section.names)
        self.names = tuple(placed.of)
        self._partial = [name for name in self._where if layout_of(params[name]).sum_over_tp]

        dtype = next(iter(dtypes), torch.float32)
        if device is None:
            device = next((p.device for p in params.values()), CPU)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        main_dtype = main_as or wide
        self.grads = torch.zeros(placed.end, dtype=grads_as or wide, device=device)
        self.model = torch.zeros(placed.owned, dtype=dtype, device=device)
        # Only views from here on: the parameters' own memory is released.
        for name in self.own:
            view = self.view(self.model, name)
            view.copy_(params[name].data)
            params[name].data = view
        self.shard = self.model if shares.size == 1 else self.model[self.share]
        self.drops = drops
        self._passing: Passing | None = None
        if drops:
            self._passing = Passing(self.model, live or Gauge())
            # The share must outlive the memory of `model`.
            self.shard = self.shard.clone()
        # Without a difference in type the model's weights are the main parameters: no second copy.
        self.rounds = has_main and dtype != main_dtype
        self.main = self.shard.to(main_dtype) if self.rounds else self.shard
        for name, param in params.items():
            # A W pass may run after the release, so it must not read this weight.
            setattr(param, "is_dropped", drops)  # noqa: B010
            self.give_grad(param, self.grads, name)

    def give_grad(self, param: nn.Parameter, grads: Tensor, name: str) -> None:
        """Let a parameter add its gradients to its part of `grads`, a tensor like `self.grads`."""
        setattr(param, "main_grad", self.view(grads, name))  # noqa: B010
        # megapipe's layers add to main_grad themselves. For any other layer, autograd's `.grad` is
        # added after it is complete, and released.
        param.register_post_accumulate_grad_hook(_add_to_main_grad)  # type: ignore[no-untyped-call]

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Return the part of a flat tensor that is one parameter, in the parameter's shape.

        Args:
            flat: a tensor like `model` or `grads`.
            name: name of the parameter.
        """
        start, shape = self._where[name]
        return flat[start : start + shape.numel()].view(shape)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter."""
        return self._where[name][1]

    def rows(self, name: str) -> slice:
        """Return a parameter's rows of flat.view(-1, ALIGN), with the padding after it."""
        start, shape = self._where[name]
        return slice(start // ALIGN, -(-(start + shape.numel()) // ALIGN))

    def zero_grad(self) -> None:
        """Set the gradients to zero at the start of a step."""
        self.grads.zero_()

    def sum_over_tp(self, tp: Axis) -> None:
        """Sum gradients over tensor parallelism, of parameters whose layout says `sum_over_tp`."""
        if tp.size > 1 and self._partial:
            views = [self.view(self.grads, name) for name in self._partial]
            # They are small, such as norms under sequence parallelism. One collective for all costs
            # less than one for each.
            summed = tp.all_reduce(torch.cat([view.flatten() for view in views]))
            parts = torch.split(summed, [view.numel() for view in views])
            for view, part in zip(views, parts, strict=True):
                view.copy_(part.view_as(view))

    def within(self, start: int, end: int) -> slice:
        """Return which of the elements start..end of a flat tensor this rank updates.

        The slice counts from the first element that this rank updates. The slice is empty if the
        rank updates none of these elements.
        """
        first = self.share.start
        begin = max(start, first)
        stop = max(min(end, self.share.stop), begin)
        return slice(begin - first, stop - first)

    def own_part(self, flat: Tensor, name: str) -> Tensor:
        """Return the elements of a parameter in `flat`, as a flat view.

        `flat` is `main`, or another tensor with the elements of this rank's share.
        """
        start, shape = self._where[name]
        return flat[self.within(start, start + shape.numel())]

    def share_of(self, whole: Tensor, name: str) -> Tensor:
        """Return this rank's elements of a full parameter, as a flat tensor.

        These are the elements that this rank updates: under ZeRO-1 a part of the parameter, or
        none.

        Args:
            whole: the full parameter.
        """
        start, shape = self._where[name]
        part = self.within(start, start + shape.numel())
        first = part.start + self.share.start - start
        return whole.reshape(-1)[first : first + part.stop - part.start]

    @property
    def reduced(self) -> Tensor:
        """The gradients of this rank's share.

        After the reduction they are sums over data parallelism.
        """
        return self.grads[self.share]

    @property
    def parts(self) -> list[Tensor]:
        """The gradients that are complete once `start_reduce` is over, as a list of flat tensors.

        Without ZeRO the list has one tensor with all gradients. Under ZeRO-1 it has this rank's
        share, and the full gradients of parameters that use another parameter's memory.
        """
        # Under ZeRO-1 other shares of `grads` hold this rank's addends only.
        if self.shares.size == 1:
            return [self.grads]
        return [self.reduced, self.grads[self.model.numel() :]]

    def start_reduce(self, dtype: torch.dtype | None = None) -> Callable[[], None]:
        """Start to sum the gradients over the replicas.

        Without ZeRO this is one all-reduce. Under ZeRO-1 it is a reduce-scatter, and an all-reduce
        for parameters that use another parameter's memory.

        Args:
            dtype: type to which gradients are rounded for the transfer; None for their own.
        Returns: a function that waits for the sums.
        """
        scattered = self.model.numel() if self.shares.size > 1 else 0
        dp = self.replicas
        own = self.reduced
        into = own if dtype is None else None
        scatter = partial(dp.start_reduce_scatter, into=into)
        jobs = []
        for start, target, part in (
            (scatter, own, self.grads[:scattered]),
            (dp.start_all_reduce, self.grads[scattered:], self.grads[scattered:]),
        ):
            if part.numel() and dp.size > 1:
                if dtype is not None:
                    part = part.to(dtype)
                jobs.append((target, start(part)))

        def finish() -> None:
            for target, pending in jobs:
                summed = pending.wait()
                # A rounded sum, or one that could not be written in place.
                if summed is not target:
                    target.copy_(summed)

        return finish

    def start_gather(self) -> Callable[[], None]:
        """Start to gather the weights that other ranks have updated, for use in F, B and W.

        Returns: a function that waits for the weights.
        """
        passing = self._passing
        is_gathered = passing is not None and passing.there
        if self.shares.size == 1 or not self.model.numel() or is_gathered:
            return lambda: None
        if passing is None:
            return start_filling(self.model, separate(self.shard), self.shares)
        passing.allocate()
        return start_filling(self.model, self.shard, self.shares)

    def drop(self) -> None:
        """Release the gathered weights after the passes that read them, if `drops` is set."""
        if self._passing is not None:
            self._passing.release()

    def start_whole(self) -> Callable[[], None]:
        """Start to gather the weights in their own type, for code that uses them between passes.

        Returns: a function that waits for the weights.
        """
        return self.start_gather()

    def end_whole(self) -> None:
        """End the use that `start_whole` began: keep this rank's share of the new values."""
        if self._passing is not None and self._passing.there:
            self.shard.copy_(self.model[self.share])

    def gathered(self, flat: Tensor, into: Tensor | None = None) -> Tensor:
        """Return a full flat tensor, in `into` or new memory, gathered from each rank's `flat`.

        Collective over data parallelism. Without ZeRO-1 it returns `flat` itself.
        """
        return self.shares.start_all_gather(flat, into).wait()

    def copy_main_to_model(self) -> None:
        """Round the updated main parameters to the model's dtype."""
        if self.rounds:
            self.shard.copy_(self.main)

    def copy_model_to_main(self) -> None:
        """Set the main parameters to this rank's share of the model's weights."""
        if self.rounds:
            self.main.copy_(self.shard)


def _at_an_end(param: nn.Parameter) -> bool:
    """Return whether a parameter has Megatron-LM's mark for word embeddings and output heads."""
    return getattr(param, "is_embedding_or_output_parameter", False)


def _add_to_main_grad(param: Tensor) -> None:
    """Add the gradient that autograd left in param.grad to param.main_grad, and release it."""
    # A layer that adds its gradient itself returns none.
    if param.grad is None:
        return
    param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
    param.grad = None
