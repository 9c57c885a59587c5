"""The routers of a rank's layers: what they saw of a step, added up, and the biases that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megapipe.config import Config, ModelConfig
from megapipe.config.layers import layer_config
from megapipe.distributed.mesh import ProcessMesh
from megapipe.models.moe.losses import LOGGED
from megapipe.models.moe.router import Router


@dataclass(frozen=True)
class Routed:
    """The routers' report of a step over all layers, the same on every rank.

    Attributes:
        losses: by Megatron-LM's names, each a mean over its layers, without its weight.
        per_layer: the same of each layer of the model, then of each depth; 0 where it has no experts.
        tokens: rows that each expert has computed, by layer.
    """

    losses: dict[str, float] = field(default_factory=dict)
    per_layer: dict[str, tuple[float, ...]] = field(default_factory=dict)
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def busiest(self) -> tuple[float, int] | None:
        """The rows of the busiest expert in means of its layer, and that layer; None where no expert has any."""
        loads = [(max(rows) * len(rows) / sum(rows), layer) for layer, rows in self.tokens.items() if any(rows)]
        return max(loads, default=None)


class Routers:
    """The routers of one rank.

    Args:
        modules: its stages.
        mirrored: DualPipe's: a stage exists twice, on mirrored ranks.
    """

    def __init__(self, modules: Sequence[nn.Module], mesh: ProcessMesh, model: ModelConfig, *, mirrored: bool) -> None:
        self.mesh, self.model = mesh, model
        found = (part for module in modules for part in module.modules())
        self.own = sorted((part for part in found if isinstance(part, Router)), key=lambda router: router.layer)
        self._twins = mesh.twins if mirrored else None
        self._kinds = [*model.balancing, *(["z_loss"] if model.moe_z_loss_coeff else [])]

    def begin(self) -> None:
        """Start a step."""
        for router in self.own:
            router.forget()

    def table(self) -> Tensor | None:
        """A table of this rank's part of a step, [n] in float64: of each layer its losses, summed over microbatches,
        and rows of its experts. None without experts."""
        if not self.model.has_experts:
            return None
        width = len(self._kinds) + self.model.experts
        table = torch.zeros(self.model.layers + self.model.depths, width, dtype=torch.float64, device=self.mesh.device)
        if self.model.sequence_parallel or self.mesh.tp.rank == 0:
            for router in self.own:
                for _, seen in sorted(router.seen.items()):
                    losses = [seen.losses[kind].double() for kind in self._kinds]
                    table[router.layer] += torch.cat((torch.stack(losses), seen.tokens)) if losses else seen.tokens
        return table.flatten()

    def read(self, values: Sequence[float], run: Config) -> Routed:
        """The report that the sums of all ranks' tables make."""
        if not values:
            return Routed()
        model, n = self.model, len(self._kinds)
        rows = [values[i : i + n + model.experts] for i in range(0, len(values), n + model.experts)]
        times = run.num_microbatches * run.data_parallel_size
        per_layer = {LOGGED[kind]: tuple(row[i] / times for row in rows) for i, kind in enumerate(self._kinds)}
        own = ((layer, layer_config(model, layer)) for layer in range(model.layers + model.depths))
        layers = [layer for layer, config in own if config.has_experts and not config.no_mlp]
        if not layers:  # overrides have left none
            return Routed()
        losses = {name: sum(of_layers) / len(layers) for name, of_layers in per_layer.items()}
        return Routed(losses, per_layer, {layer: tuple(map(int, rows[layer][n:])) for layer in layers})

    def moved(self) -> list[tuple[Tensor, Tensor]]:
        """Return each bias and what it is after this step: a step of --moe-router-bias-update-rate towards the load's
        mean over all ranks and microbatches. Collective over the ranks with these layers."""
        biases = [(router.layer, bias) for router in self.own if (bias := router.expert_bias) is not None]
        if not biases:
            return []
        layers = sorted({router.layer for router in self.own})
        counts = torch.zeros(len(layers), self.model.experts, dtype=torch.int64, device=self.mesh.device)
        for router in self.own:
            for seen in router.seen.values():
                counts[layers.index(router.layer)] += seen.tokens
        if self.model.sequence_parallel:
            self.mesh.tp.all_reduce(counts)
        self.mesh.dp_cp.all_reduce(counts)
        if self._twins is not None:
            self._twins.all_reduce(counts)
        towards = torch.sign(counts.sum(-1, keepdim=True) - counts * self.model.experts).float()
        steps = dict(zip(layers, towards * self.model.moe_router_bias_update_rate, strict=True))
        return [(bias, bias + steps[layer]) for layer, bias in biases]
