"""Parameters and gradients of a stage, or of a bucket of its layers, laid out flat: one all-reduce, one fused update
and one copy each.

    gradients    [ ends | decayed | not decayed | borrowed ]     float32 (float64 for a float64 model)
    main         [ ends | decayed | not decayed ]                as the gradients; what the optimizer updates
                                                                 (bf16 each by --main-grads-dtype, --main-params-dtype)
    model        [ ends | decayed | not decayed ]                what the layers compute with; `main` itself unless bf16

The ends are word embeddings and output head, which may have a learning rate of their own; they are decayed too.

Parameters with a rate or decay of their own (rule.Group) make further sections like these.

Under ZeRO-1 (Rajbhandari et al. 2020, sec. 5) what is not borrowed is padded to equal shares, one of each data-parallel
rank. `main` has this rank's share alone; its gradients are reduced there, and `model` is gathered from all shares.

Every parameter starts at a multiple of 64 elements and is padded with zeros to the next, so a vectorised kernel has no
remainder to treat in another way and a parameter gets the same bits wherever it lies.
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
from megapipe.optim.sharded.passing import Passing, apart, start_filling

ALIGN = 64


class Section(NamedTuple):
    """Parameters that lie together in `main` as they are updated alike.

    Attributes:
        at_end: they are word embeddings or output head, which may have a learning rate of their own.
    """

    group: Group
    at_end: bool
    names: tuple[str, ...]
    where: slice


class Positions(NamedTuple):
    """Where parameters lie in flat tensors.

    Attributes:
        of: first element and shape of each parameter.
        sections: parameters that are updated alike, with the elements that they span.
        owned: elements before the borrowed parameters, whole rows of ALIGN for each share; end: all elements.
    """

    of: dict[str, tuple[int, torch.Size]]
    sections: list[Section]
    owned: int
    end: int


def positions(params: Mapping[str, nn.Parameter], borrowed: Collection[str], shares: int, groups: Groups) -> Positions:
    """Lay parameters out, so that a rule has few long tensors in place of many short ones."""
    alike: dict[tuple[bool, Group], list[str]] = {}
    for name, param in params.items():
        if name not in borrowed:
            alike.setdefault((_at_an_end(param), groups(name, param.shape)), []).append(name)
    of: dict[str, tuple[int, torch.Size]] = {}

    def place(names: Iterable[str], start: int) -> int:
        for name in names:
            of[name] = (start, params[name].shape)
            start += -(-params[name].numel() // ALIGN) * ALIGN
        return start

    sections = list[Section]()
    end = 0
    for at_end, group in sorted(alike, key=lambda kind: (not kind[0], -kind[1].weight_decay, kind[1].lr)):
        names = alike[at_end, group]
        start, end = end, place(names, end)
        sections.append(Section(group, at_end, tuple(names), slice(start, end)))
    owned = end + -end % (ALIGN * shares)
    return Positions(of, sections, owned, place((name for name in params if name in borrowed), owned))


class FlatBuffers:
    """The flat storage of one stage. Its parameters become views of `model` and get `main_grad`, a view of `grads`.

    Args:
        params: the stage's parameters by name, of one floating dtype on one device.
        borrowed: names of those whose weight is another's (a tied head whose embedding is here): they have a gradient
            here and nothing else.
        has_main: False for a replica, whose main parameters are on another rank; `main` is then `model`.
        device: of a stage without parameters, which takes part in collectives all the same.
        replicas: the ranks that have the same parameters, over which gradients are summed.
        distributed: `main` is split over them.
        groups: which parameters are updated alike.
        grads_as, main_as: types of `grads` and `main` where they are not the usual ones.
        drops: `model` is there between a gathering and `drop` alone; live: counts the bytes of what comes and goes.
    Attributes:
        sections: in their order, with what this rank's share has of them.
        shard: the model's weights of the share.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        borrowed: Collection[str] = (),
        *,
        has_main: bool = True,
        device: torch.device = CPU,
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
        lie = positions(params, borrowed, shares.size, groups)
        size = lie.owned // shares.size
        self._where = lie.of
        self.share = slice(shares.rank * size, (shares.rank + 1) * size)
        self.sections = [x._replace(where=self.within(x.where.start, x.where.stop)) for x in lie.sections]
        self.own = tuple(name for section in self.sections for name in section.names)
        self._partial = [name for name in self._where if layout_of(params[name]).sum_over_tp]

        dtype = next(iter(dtypes), torch.float32)
        device = next((p.device for p in params.values()), device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        main_dtype = main_as or wide
        self.grads = torch.zeros(lie.end, dtype=grads_as or wide, device=device)
        self.model = torch.zeros(lie.owned, dtype=dtype, device=device)
        for name in self.own:
            view = self.view(self.model, name)
            view.copy_(params[name].data)
            params[name].data = view
        self.shard = self.model if shares.size == 1 else self.model[self.share]
        self._passing = Passing(self.model, live or Gauge()) if drops else None
        if drops:
            self.shard = self.shard.clone()
        self.rounds = has_main and dtype != main_dtype
        # float32 weights that are nobody else's are their own main parameters: no second copy, no rounding.
        self.main = self.shard.to(main_dtype) if self.rounds else self.shard
        for name, param in params.items():
            setattr(param, "main_grad", self.view(self.grads, name))  # noqa: B010
            # Layers of ours add into main_grad themselves; of all others autograd's `.grad` lives for a moment only.
            param.register_post_accumulate_grad_hook(_add_to_main_grad)  # type: ignore[no-untyped-call]

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A parameter's part of a flat tensor, in the parameter's shape."""
        start, shape = self._where[name]
        return flat[start : start + shape.numel()].view(shape)

    def rows(self, name: str) -> slice:
        """A parameter's rows of a flat tensor viewed as [-1, ALIGN], zeros of its padding included."""
        start, shape = self._where[name]
        return slice(start // ALIGN, -(-(start + shape.numel()) // ALIGN))

    def zero_grad(self) -> None:
        """Start a step."""
        self.grads.zero_()

    def sum_over_tp(self, tp: Axis) -> None:
        """Add up the gradients of parameters whose layout says so, in one all-reduce."""
        if tp.size > 1 and self._partial:
            views = [self.view(self.grads, name) for name in self._partial]
            # Small ones, such as norms under sequence parallelism: one collective for all costs less than one for
            # each.
            summed = tp.all_reduce(torch.cat([view.flatten() for view in views]))
            for view, part in zip(views, torch.split(summed, [view.numel() for view in views]), strict=True):
                view.copy_(part.view_as(view))

    def within(self, start: int, end: int) -> slice:
        """The part of start..end in this rank's share, counted from its beginning; empty if there is none."""
        first, last = self.share.start, self.share.stop
        return slice(max(start, first) - first, max(min(end, last), max(start, first)) - first)

    def own_part(self, flat: Tensor, name: str) -> Tensor:
        """The part that a tensor of the share's size has of a parameter, flat."""
        start, shape = self._where[name]
        return flat[self.within(start, start + shape.numel())]

    def share_of(self, whole: Tensor, name: str) -> Tensor:
        """The part of a whole parameter that `own_part` has of it, flat."""
        start, shape = self._where[name]
        part = self.within(start, start + shape.numel())
        first = part.start + self.share.start - start
        return whole.reshape(-1)[first : first + part.stop - part.start]

    @property
    def reduced(self) -> Tensor:
        """The gradients of the share; summed over data parallel once that is done."""
        return self.grads[self.share]

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that `start_reduce` makes right: all gradients, or under ZeRO-1 the share's and the borrowed."""
        return [self.grads] if self.shares.size == 1 else [self.reduced, self.grads[self.model.numel() :]]

    def start_reduce(self, dtype: torch.dtype | None = None) -> Callable[[], None]:
        """Sum the gradients over their replicas, rounded to `dtype` if given; what is returned waits for it.

        One all-reduce; under ZeRO-1 one reduce-scatter, and an all-reduce of what is borrowed.
        """
        shared = self.model.numel() if self.shares.size > 1 else 0
        jobs, dp, own = [], self.replicas, self.reduced
        scatter = partial(dp.start_reduce_scatter, into=own if dtype is None else None)
        for start, into, part in (
            (scatter, own, self.grads[:shared]),
            (dp.start_all_reduce, self.grads[shared:], self.grads[shared:]),
        ):
            if part.numel() and dp.size > 1:
                jobs.append((into, start(part if dtype is None else part.to(dtype))))

        def finish() -> None:
            for into, pending in jobs:
                summed = pending.wait()
                if summed is not into:
                    into.copy_(summed)

        return finish

    def start_gather(self) -> Callable[[], None]:
        """Begin to gather the weights that other ranks have updated, for passes; returns as above."""
        passing = self._passing
        if self.shares.size == 1 or not self.model.numel() or (passing is not None and passing.there):
            return lambda: None
        if passing is None:
            return start_filling(self.model, apart(self.shard), self.shares)
        passing.come()
        return start_filling(self.model, self.shard, self.shares)

    def drop(self) -> None:
        """Let go of the gathered weights, after the passes that read them."""
        if self._passing is not None:
            self._passing.go()

    def start_whole(self) -> Callable[[], None]:
        """Begin to gather the weights in their own type, for who reads or writes them between passes."""
        return self.start_gather()

    def end_whole(self) -> None:
        """End what `start_whole` has begun: this rank's share of what was written is its own."""
        if self._passing is not None and self._passing.there:
            self.shard.copy_(self.model[self.share])

    def gathered(self, flat: Tensor) -> Tensor:
        """A tensor of the share's size, whole: the shares of all ranks. Collective over data parallel."""
        return self.shares.all_gather(flat) if self.shares.size > 1 else flat

    def copy_main_to_model(self) -> None:
        """Round the updated main parameters to the model's dtype."""
        if self.rounds:
            self.shard.copy_(self.main)

    def copy_model_to_main(self) -> None:
        """Start from the model's weights, which must be whole; for example after loading those alone."""
        if self.rounds:
            self.main.copy_(self.model[self.share])


def _at_an_end(param: nn.Parameter) -> bool:
    """Word embeddings or output head, by Megatron-LM's mark."""
    return getattr(param, "is_embedding_or_output_parameter", False)


def _add_to_main_grad(param: Tensor) -> None:
    if param.grad is None:  # the layer added its gradient itself and returned none
        return
    param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
    param.grad = None
