"""The work of one microbatch on a piece of the model: time, bytes and parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import add

from megapipe.plan.layers.load import RankLoad


@dataclass(frozen=True)
class Work:
    """The work and memory of one microbatch in a piece of the model.

    A piece is an embedding, a layer, a head, or a stage of these. Two works can be added. `part`
    divides an embedding and head by a number of ranks, `in_fp8` adds the bytes of quantised
    weights, and `time` is f + b + w. Bytes are counted on one rank, FLOPs and parameters over all
    tensor- and expert-parallel ranks that split the piece.

    Attributes:
        f: the forward, in FLOPs or any unit of time.
        b: the gradient of the input with all recomputation, in the same unit.
        w: the gradients of the weights, in the same unit.
        held: bytes kept from F to B.
        kept: bytes kept from B to W: a part of `held`, and the tensors that B adds.
        parameters: the number of parameters.
        unused: number of parameters that a token does not use, because it goes to few experts.
        experts: number of parameters that expert-parallel ranks split.
        scores_f: the part of `f` that is larger for later tokens: attention without a window.
        scores_b: the same part of `b`.
        keys: bytes of keys and values.
        kept_keys: bytes of keys and values that are kept in addition to `held`, if microbatches are
            cut into slices.
        rounded: bytes of the 8-bit copies of weights, less the bytes of gathered weights that they
            replace.
        copied: the part of `held` that the modules in --offload-modules keep, and so may be
            offloaded.
        lighter: bytes by which gathered weights are smaller because they are in eight bits.
        passing: bytes that F and B need only while they run, beyond `held`. Pieces run one after
            another, so a sum has the largest.
        again: bytes that B makes again because F did not keep them. B needs them beyond `passing`,
            and for several layers at once if these are made again together.
    """

    f: float = 0.0
    b: float = 0.0
    w: float = 0.0
    held: float = 0.0
    kept: float = 0.0
    parameters: int = 0
    unused: int = 0
    experts: int = 0
    scores_f: float = 0.0
    scores_b: float = 0.0
    keys: float = 0.0
    kept_keys: float = 0.0
    rounded: float = 0.0
    copied: float = 0.0
    lighter: float = 0.0
    passing: float = 0.0
    again: float = 0.0

    def __add__(self, other: Work) -> Work:
        total = Work(*map(add, vars(self).values(), vars(other).values()))
        return replace(total, passing=max(self.passing, other.passing))

    def part(self, shares: int) -> Work:
        """Return the work of an embedding and head on one of the `shares` ranks that split them.

        Fields that such pieces do not have are 0.
        """
        return Work(
            self.f / shares,
            self.b / shares,
            self.w / shares,
            held=self.held / shares,
            kept=self.kept / shares,
            parameters=self.parameters // shares,
        )

    def in_fp8(self, load: RankLoad) -> Work:
        """Return this layer's work with `rounded` and `lighter`, the bytes of quantised weights.

        Args:
            load: the ranks that split the layer, and the ranks that gather its weights.
        """
        rounded = 0.0
        lighter = 0.0
        dense = (self.parameters - self.experts) / load.tp
        experts = self.experts / (load.ep * load.etp)
        for here, ranks in ((dense, load.gathers.dense), (experts, load.gathers.experts)):
            # A byte for each of the two products, forward and input gradient, as they sum over
            # different dimensions.
            rounded += 2 * here
            if ranks == 1:
                continue
            # Weights of one product are gathered anyway. They come in eight bits, in place of the
            # full type.
            instead = 1.0
            if not load.gathers.drops:
                instead = load.element * (1 - 1 / ranks)
            rounded -= here * instead
            lighter += (load.element - 1) * here
        return replace(self, rounded=rounded, lighter=lighter)

    @property
    def time(self) -> float:
        """The time of the three passes F, B and W, in the unit of `f`."""
        return self.f + self.b + self.w
