"""The B/W split: defer weight-gradient products from the B pass to the W pass.

Each pipeline stage owns one WeightGrads. A layer's forward remembers the current one, as two
stages of a rank may be in flight. Its backward submits the products, which run at once, or are kept
for the W pass. They add into the weight's main_grad.
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
from megapipe.tensor_parallel.products import Products

Job: TypeAlias = "Callable[[], None] | InTwo"
"""A weight-gradient product: called once, it adds into a main_grad."""


class InTwo(NamedTuple):
    """A matrix product of a weight gradient whose operands a collective must bring first.

    Attributes:
        begin: starts the collective, and returns a function that waits for it and multiplies.
    """

    begin: Callable[[], Callable[[], None]]

    def __call__(self) -> None:
        self.begin()()


# Each stage runs in a contextvars context of its own, so a stage's layers find its WeightGrads even
# while another stage's pass is in flight.
_current: ContextVar[WeightGrads | None] = ContextVar("weight_grads", default=None)


class _Backward(threading.local):
    """The state of the B pass that this thread runs.

    Two B passes of one stage may run at the same time, in two threads.

    Attributes:
        owes: the products that the B pass has left to the W pass of its microbatch so far; None
            outside of B passes.
    """

    owes: list[Job] | None = None


class WeightGrads:
    """The matrix products of a stage's weight gradients that B passes leave to W passes.

    `capturing` is a context for forwards, `deferring` one for a B pass, and `run` is the W pass. In
    backward, layers give each product to `submit`.

    `capture` is `capturing` without an end. `owed` lists microbatches that wait for W.
    """

    def __init__(self) -> None:
        self._owed: dict[int, list[Job]] = {}
        self._backward = _Backward()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Return a context for forwards, whose weight-gradient products come to this object.

        The layers submit these products in backward.
        """
        token = self.capture()
        try:
            yield
        finally:
            _current.reset(token)

    def capture(self) -> Token[WeightGrads | None]:
        """Do as `capturing` does, but to the end of the running contextvars context.

        Returns: contextvars' token, which restores the state before.
        """
        return _current.set(self)

    @contextmanager
    def deferring(self, microbatch: int) -> Iterator[None]:
        """Return a context for a B pass, whose weight gradients wait for `run(microbatch)`."""
        # One list with two names: the running B appends to it, and W finds it by microbatch.
        self._backward.owes = self._owed[microbatch] = []
        try:
            # Autograd would run a GPU's backward in another thread, which would not see the list.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            self._backward.owes = None

    def run(self, microbatch: int) -> None:
        """Run the W pass of a microbatch.

        The collectives of each product start before the product that precedes it, and overlap
        with that product.
        """
        jobs = iter(self._owed.pop(microbatch))
        multiply = _begun(next(jobs, None))
        is_first = True
        while multiply is not None:
            if not is_first and at_waits.give_turn is not None:
                # W only computes: between two products, another pass may find its transfer over.
                at_waits.give_turn()
            following = _begun(next(jobs, None))
            multiply()
            multiply = following
            is_first = False

    @property
    def owed(self) -> tuple[int, ...]:
        """The microbatches whose W pass has not run yet."""
        return tuple(self._owed)

    @property
    def is_deferring(self) -> bool:
        """Whether this thread runs a B pass of the stage, so that products are kept."""
        return self._backward.owes is not None

    def submit(self, job: Job) -> None:
        """Run a product now, or keep it for the W pass if this thread runs a B pass.

        Args:
            job: computes the product and adds it into the weight's main_grad.
        """
        owes = self._backward.owes
        if owes is None:
            job()
        else:
            owes.append(job)


def _begun(job: Job | None) -> Callable[[], None] | None:
    """Start a product's collectives, if it has any, and return a function that multiplies.

    Args:
        job: the product. None: the result is None.
    """
    return job.begin() if isinstance(job, InTwo) else job


def current_weight_grads() -> WeightGrads | None:
    """Return the WeightGrads of the stage whose forward is running; None outside a pipeline.

    A layer calls this in forward, and submits its products to the object in backward.
    """
    return _current.get()


def submit_weight_grad(
    weight: Tensor, add: Callable[[Tensor], None], owner: WeightGrads | None
) -> Tensor | None:
    """Add a weight's gradient into its main_grad, now or in the stage's W pass.

    Args:
        add: adds the gradient into a tensor of the weight's shape.
        owner: the stage's WeightGrads, which may defer the call to the W pass; None to add now.
    Returns: None; if the weight has no main_grad, the gradient for autograd.
    """
    into: Tensor | None = getattr(weight, "main_grad", None)
    if into is None:
        into = torch.zeros_like(weight)
        add(into)
        return into
    if owner is None:
        add(into)
    else:
        owner.submit(lambda: add(into))
    return None


def accumulate_weight_grad(
    weight: Tensor,
    grad_output: Tensor,
    x: Tensor,
    owner: WeightGrads | None,
    products: Products,
) -> Tensor | None:
    """Add a linear layer's weight gradient dy^T x into the weight's main_grad, now or in W.

    Args:
        weight: [out, in].
        grad_output: dy, [..., out].
        x: [..., in].
        owner: the stage's WeightGrads, which may defer the product; None to multiply now.
        products: computes the product, quantised or not.
    Returns: None; if the weight has no main_grad, the gradient for autograd.
    """
    dy = grad_output.reshape(-1, grad_output.shape[-1])
    x = x.reshape(-1, x.shape[-1])
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    # A weight outside of the optimizer's buffers, in a test or a user's module: autograd sums it.
    if main_grad is None:
        return products.weight_grad(dy, x).to(weight.dtype)
    # The job keeps dy and x alive until W: this is the memory that a split backward costs.
    job = partial(products.add_weight_grad, main_grad, dy, x)
    if owner is None:
        job()
    else:
        owner.submit(job)
    return None
