"""Sum up what the MoE routers of a rank recorded in a step, and update their expert biases."""

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
    """The report of all routers on one step, equal on every rank.

    `busiest` finds the expert with most tokens.

    Attributes:
        losses: each loss by Megatron-LM's name, its mean over the layers with experts, without its
            coefficient.
        per_layer: the same losses for each layer of the model, then for each module of multi-token
            prediction. A layer without experts has 0.
        tokens: {layer: (number of tokens routed to each expert)}.
    """

    losses: dict[str, float] = field(default_factory=dict)
    per_layer: dict[str, tuple[float, ...]] = field(default_factory=dict)
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def busiest(self) -> tuple[float, int] | None:
        """Return (load of the busiest expert, its layer's index); None without any tokens.

        The load is the expert's tokens divided by the mean over the experts of its layer.
        """
        loads = []
        for layer, rows in self.tokens.items():
            if any(rows):
                loads.append((max(rows) * len(rows) / sum(rows), layer))
        return max(loads, default=None)


class Routers:
    """All MoE routers on one rank.

    `begin` starts a step. `table` returns this rank's sums of balancing losses and of tokens per
    expert. `read` makes the report of these sums over all ranks. `buffer_updates` returns the
    expert biases after the step.

    Args:
        modules: this rank's stages.
        mesh: this rank's mesh.
        model: the model's configuration.
        mirrored: whether each stage is on two ranks, as under DualPipe. Both ranks then sum their
            tokens, so that their expert biases stay equal.
    """

    def __init__(
        self, modules: Sequence[nn.Module], mesh: ProcessMesh, model: ModelConfig, *, mirrored: bool
    ) -> None:
        self.mesh = mesh
        self.model = model
        found = [part for module in modules for part in module.modules()]
        routers = [part for part in found if isinstance(part, Router)]
        self.own = sorted(routers, key=lambda router: router.layer)
        self._twins = mesh.twins if mirrored else None
        self._kinds = list(model.balancing)
        if model.moe_z_loss_coeff:
            self._kinds.append("z_loss")

    def begin(self) -> None:
        """Drop the records of the last step."""
        for router in self.own:
            router.forget()

    def table(self) -> Tensor | None:
        """Return this rank's sums of a step, [layers * (losses + experts)] in float64.

        For each layer and module of multi-token prediction: the losses summed over microbatches,
        then the number of tokens of each expert. Returns None for a model without experts.
        """
        model = self.model
        if not model.has_experts:
            return None
        layers = model.layers + model.depths
        width = len(self._kinds) + model.experts
        table = torch.zeros(layers, width, dtype=torch.float64, device=self.mesh.device)
        # Without sequence parallelism all tensor-parallel ranks route the same tokens: count once.
        if model.sequence_parallel or self.mesh.tp.rank == 0:
            for router in self.own:
                # Sorted, so that slices and schedules add up in one order.
                for _, seen in sorted(router.seen.items()):
                    row = seen.tokens
                    if self._kinds:
                        losses = [seen.losses[kind].double() for kind in self._kinds]
                        row = torch.cat((torch.stack(losses), seen.tokens))
                    table[router.layer] += row
        return table.flatten()

    def read(self, values: Sequence[float], run: Config) -> Routed:
        """Return the balancing losses and tokens per expert of a step, for the log.

        Args:
            values: the elements of `table`, summed over all ranks; empty without experts.
            run: the configuration with the batch size of the step.
        """
        if not values:
            return Routed()
        model = self.model
        n = len(self._kinds)
        width = n + model.experts
        rows = [values[i : i + width] for i in range(0, len(values), width)]
        # Each microbatch adds one loss of each layer, in every data-parallel rank.
        times = run.num_microbatches * run.data_parallel_size
        per_layer = {}
        for i, kind in enumerate(self._kinds):
            per_layer[LOGGED[kind]] = tuple(row[i] / times for row in rows)
        # --per-layer-overrides can take the experts out of a layer, or out of all layers.
        layers = []
        for layer in range(model.layers + model.depths):
            own = layer_config(model, layer)
            if own.has_experts and not own.no_mlp:
                layers.append(layer)
        if not layers:
            return Routed()
        losses = {name: sum(of_layers) / len(layers) for name, of_layers in per_layer.items()}
        tokens = {layer: tuple(map(int, rows[layer][n:])) for layer in layers}
        return Routed(losses, per_layer, tokens)

    def buffer_updates(self) -> list[tuple[Tensor, Tensor]]:
        """Return (expert bias, the bias after this step) of each layer (Wang et al. 2024).

        An expert's bias goes up by --moe-router-bias-update-rate if its load is below the mean, and
        down if it is above. The load counts all ranks and microbatches. Collective over the
        ranks with these layers.
        """
        biases = []
        for router in self.own:
            if router.expert_bias is not None:
                biases.append((router.layer, router.expert_bias))
        if not biases:
            return []
        # Sorted, as counts are added row by row: a mirrored rank has the same layers in stages of
        # another order.
        layers = sorted({router.layer for router in self.own})
        size = (len(layers), self.model.experts)
        # Integers, so that the sum depends on no order.
        counts = torch.zeros(size, dtype=torch.int64, device=self.mesh.device)
        for router in self.own:
            for seen in router.seen.values():
                counts[layers.index(router.layer)] += seen.tokens
        if self.model.sequence_parallel:
            self.mesh.tp.all_reduce(counts)
        self.mesh.dp_cp.all_reduce(counts)
        if self._twins is not None:
            self._twins.all_reduce(counts)
        # sign(mean - count), multiplied by the number of experts to stay in integers.
        signs = torch.sign(counts.sum(-1, keepdim=True) - counts * self.model.experts).float()
        changes = signs * self.model.moe_router_bias_update_rate
        by_layer = dict(zip(layers, changes, strict=True))
        return [(bias, bias + by_layer[layer]) for layer, bias in biases]
