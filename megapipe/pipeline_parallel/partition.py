"""Which layers a stage holds. Every layer of the model is on exactly one stage of each chain, in order."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule import Placement, ScheduleError


@dataclass(frozen=True)
class LayerSpan:
    """A stage's share of the model.

    Attributes:
        first, count: global number of its first layer, and how many there are.
        embedding: does it embed the tokens?
        loss: does it hold the final norm, the output head and the loss?
    """

    first: int
    count: int
    embedding: bool
    loss: bool

    @property
    def layers(self) -> range:
        """Global numbers of the layers."""
        return range(self.first, self.first + self.count)


def partition(num_layers: int, placement: Placement) -> tuple[LayerSpan, ...]:
    """The span of each stage: layers split evenly over a chain, embedding first, loss last.

    Raises: ScheduleError if the layers do not divide.
    """
    count, rest = divmod(num_layers, placement.chain)
    if rest:
        near = [n * placement.chain for n in (count, count + 1) if n]
        raise ScheduleError(
            f"--num-layers {num_layers} does not fill {placement.chain} stages: "
            f"{num_layers} = {placement.chain} x {count} + {rest}.\n"
            f"      Use --num-layers {' or '.join(map(str, near))}."
        )
    return tuple(
        LayerSpan(placement.position(s) * count, count, placement.is_first(s), placement.is_last(s))
        for s in range(placement.num_stages)
    )
