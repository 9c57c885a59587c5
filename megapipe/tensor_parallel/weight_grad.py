"""The B/W split: weight-gradient products that wait.

A stage owns one WeightGrads. Layers catch it at forward (no global switch: two stages of a rank may be in flight) and
hand it their products in backward; it adds them into the main gradient at once, or keeps them for the W pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from megapipe.distributed.axis import at_waits
from megapipe.tensor_parallel.products import PLAIN, Products

Job: TypeAlias = "Callable[[], None] | InTwo"


class InTwo(NamedTuple):
    """A product that waits for other ranks. begin: asks them, and returns what waits and multiplies."""

    begin: Callable[[], Callable[[], None]]

    def __call__(self) -> None:
        self.begin()()


_current: ContextVar[WeightGrads | None] = ContextVar("weight_grads", default=None)


class _Backward(threading.local):
    """The B pass that this thread runs: two of one stage may run together."""

    owes: list[Job] | None = None


class WeightGrads:
    """The weight-gradient products of one stage, in the order of its backward passes."""

    def __init__(self) -> None:
        self._owed: dict[int, list[Job]] = {}
        self._backward = _Backward()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Layers that run forward in this context hand their weight gradients here."""
        token = self.capture()
        try:
            yield
        finally:
            _current.reset(token)

    def capture(self) -> Token[WeightGrads | None]:
        """Catch the layers of the rest of the running contextvars context."""
        return _current.set(self)

    @contextmanager
    def deferring(self, microbatch: int) -> Iterator[None]:
        """The B pass of a microbatch: products are kept until `run(microbatch)`."""
        # One list under two names: jobs go into the B that runs, and are found by their microbatch in W.
        self._backward.owes = self._owed[microbatch] = []
        try:
            # Autograd has a thread of its own for a GPU's backward, which would not find the list.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            self._backward.owes = None

    def run(self, microbatch: int) -> None:
        """The W pass of a microbatch: what a product waits for travels during the one before."""
        jobs = iter(self._owed.pop(microbatch))
        multiply, first = _begun(next(jobs, None)), True
        while multiply is not None:
            if not first and at_waits.give_turn is not None:
                at_waits.give_turn()  # a pass that only computes, cut where another one's transfer may be over
            then, first = _begun(next(jobs, None)), False
            multiply()
            multiply = then

    @property
    def owed(self) -> tuple[int, ...]:
        """Microbatches whose W pass has not come yet."""
        return tuple(self._owed)

    @property
    def is_deferring(self) -> bool:
        """Is the stage in a B pass, so that its products are owed?"""
        return self._backward.owes is not None

    def submit(self, job: Job) -> None:
        """Do a product now, or keep it if the stage is in a B pass."""
        owes = self._backward.owes
        if owes is None:
            job()
        else:
            owes.append(job)


def _begun(job: Job | None) -> Callable[[], None] | None:
    return job.begin() if isinstance(job, InTwo) else job


def current_weight_grads() -> WeightGrads | None:
    """The stage whose forward is running, None outside a pipeline. Layers keep it for their backward."""
    return _current.get()


def accumulate_weight_grad(
    weight: Tensor, grad_output: Tensor, x: Tensor, owner: WeightGrads | None, products: Products = PLAIN
) -> Tensor | None:
    """The weight gradient of a linear layer, dy^T x.

    Args:
        weight: [out, in]; its `main_grad` takes the product if there is one.
        grad_output: [..., out].
        x: [..., in].
        owner: the stage that may put the product off.
        products: how it is computed.
    Returns: the gradient for autograd if the weight has no main_grad, else None.
    """
    dy, x = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    # A weight outside of the optimizer's buffers, as in tests and in a user's own module: autograd sums it.
    if main_grad is None:
        return products.weight_grad(dy, x).to(weight.dtype)
    # It holds dy and x until W: that is the memory which a split backward costs.
    job = partial(products.add_weight_grad, main_grad, dy, x)
    if owner is None:
        job()
    else:
        owner.submit(job)
    return None
