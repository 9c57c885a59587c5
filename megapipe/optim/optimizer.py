"""The optimizer: a rule over the flat buffers of a rank, with one view of the whole model's parameters.

A step does the same arithmetic in the same order under every layout: gradients are summed over data parallel and twins,
the two uses of a tied weight are added, and the norm is summed over the model's parameters in one global order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from megapipe.config import TrainConfig
from megapipe.distributed.device import Gauge
from megapipe.distributed.late import Late
from megapipe.distributed.layout import layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.optim.buffers import FlatBuffers
from megapipe.optim.census import check_trained, frozen, take_census, trained
from megapipe.optim.norm import Norm
from megapipe.optim.reduction import Reduction
from megapipe.optim.rule import Factors, Groups, Part, Rates, multiply, usual_groups
from megapipe.optim.rules import find_rule, split_problem, wide_of
from megapipe.optim.sharded.gathers import Gathers
from megapipe.optim.sharded.storage import Storage, dtype_of, in_eight_bits
from megapipe.optim.ties import Ties


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step, summed over ranks, where they lie.

    Attributes:
        norm: of all ranks, before clipping, as if they were scaled.
        scale: they are still to be multiplied by it.
    """

    norm: Late[float]
    scale: float | Tensor


class Optimizer:
    """A rule (rule.py: AdamW, or what --optimizer names) with clipping by the global norm.

    Constructing it moves the parameters into flat buffers and gives each a `main_grad`. Collective over the pipeline,
    as is every method that says so; `reduce` and `update` are collective over the mesh.

    Under DualPipe a stage exists twice, on mirrored ranks, which sum their gradients; the rank where it is of the first
    chain has main parameters and state, updates, and sends the weights on. So norm and checkpoint see each once.

    Args:
        stages: this rank's pieces of the model in ascending order; names of parameters are unique in the whole model.
        gathers_later: a step leaves updated weights to `gathers` of the next, or to its `settle`.
        groups: which parameters have a rate or decay of their own.
        bucket_size, num_buckets: elements, or of a stage, that are summed over data parallel at once; see buckets_of.
        distributed: ZeRO-1: each data-parallel rank has main parameters and moments of its share alone. Same bits.
        shards_grads, shards_weights: and of gradients and weights, which are whole while passes use them.
        eight_bits: weights that are quantised are gathered so.
    Attributes:
        chunks: of each stage its buckets, in the order in which they are done; buffers: all of them.
        gathers: of their weights.
        reduction: makes the sums of a step's gradients, none of which has begun.
        owned: those whose main parameters and state are on this rank: all, half of them under DualPipe.
        moments: what the rule keeps, by kind a tensor like `main` for each of `owned`.
        live: what comes and goes of them within a step.
        steps: updates made so far; Adam's bias correction needs it.
    Parameters with requires_grad False are no part of it.
    Raises: ConfigError for names that occur twice, for ties that cannot be kept and if nothing is trained.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        train: TrainConfig,
        mesh: ProcessMesh,
        *,
        groups: Groups = usual_groups,
        distributed: bool = False,
        shards_grads: bool = False,
        shards_weights: bool = False,
        eight_bits: bool = False,
        gathers_later: bool = False,
        bucket_size: int | None = None,
        num_buckets: int | None = None,
    ) -> None:
        self.mesh, self.train, self.rule = mesh, train, find_rule(train)
        self.distributed = distributed and mesh.dp_cp.size > 1
        self.gathers_later = gathers_later
        if self.distributed and (problem := split_problem(train, self.rule)):
            raise ConfigError(problem)
        census = take_census(stages, mesh)
        if not train.freeze_all_layers:
            check_trained(census.owners)
        self._frozen = frozen(stages, census.owners, mesh)
        self.params = dict(pair for stage in stages for pair in trained(stage))
        self.ties = ties = Ties(census, self.params, mesh)
        self.live = Gauge()
        self.steps = 0
        eight = in_eight_bits(stages) if eight_bits and self.distributed else {}
        shards = self.distributed, shards_grads, shards_weights
        storage = Storage(train, groups, ties, self.live, *shards, eight, bucket_size, num_buckets)
        layout = storage.layout(stages)
        self.chunks = [list(map(storage.buffers, chunk)) for chunk in layout]
        self.buffers = [buffers for chunk in self.chunks for buffers in chunk]
        stored = list(zip(chain.from_iterable(layout), self.buffers, strict=True))
        self.owned = [buffers for where, buffers in stored if where.here]
        self._stay = [buffers for where, buffers in stored if where.stays]
        # (position of the owner in mesh.twins, buffers), in one order on both ranks
        by_name = sorted(stored, key=lambda pair: pair[0].name)
        self._twins = [(where.owner, buffers) for where, buffers in by_name if where.owner is not None]
        runs = [[buffers for buffers in chunk if buffers not in self._stay] for chunk in self.chunks]
        ready = [[(x.bucket.first, x.bucket.layers) for x in chunk if not x.stays] for chunk in layout]
        twins = [buffers for _, buffers in self._twins]
        dtype = torch.bfloat16 if train.grad_reduce_in_bf16 else None
        self.reduction = partial(Reduction, runs, ready, twins, ties, self._stay, dtype)
        self._norm = Norm(mesh, census.order, self.params)
        lenders, self._sends = ties.of_chunks([[name for name, _ in trained(stage)] for stage in stages])
        drops = self.distributed and shards_weights
        self.gathers = Gathers(runs, lenders, drops=drops, in_eight_bits=bool(eight))
        self.moments = {kind: [_zeros(b, kind, train) for b in self.owned] for kind in self.rule.state}
        ties.share()
        self._send_to_twins()
        with self.gathers.whole():
            self.reload_main()

    def zero_grad(self) -> None:
        """Start a step."""
        for buffers in self.buffers:
            buffers.zero_grad()

    def reduce(self, scale: float | Tensor = 1.0, sums: Reduction | None = None) -> Gradients:
        """Reduce what is not, and begin to take the norm of all ranks, as if gradients were scaled; `update` scales.

        Args:
            scale: one on the device is not read.
            sums: of this step, some of which have begun.
        """
        (sums or self.reduction()).finish()
        return Gradients(self._norm.start(self.owned, [b.reduced for b in self.owned], scale), scale)

    def count_zeros(self) -> int:
        """Gradient elements that are exactly zero. Collective over the mesh."""
        return self._norm.zeros(self.owned, split=self.distributed)

    def shrink(self, norm: float) -> float:
        """The factor of --clip-grad on gradients of this norm."""
        return min(1.0, self.train.clip_grad / (norm + 1e-6)) if self.train.clip_grad > 0 else 1.0

    def params_norm(self) -> float:
        """L2 norm of all parameters, frozen ones too, tied and replicated ones once. Collective over the mesh."""
        trained = self._norm.start(self.owned, [b.main for b in self.owned])()
        return trained if self._frozen is None else math.hypot(trained, self._norm.of_frozen(self._frozen))

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The tensors that a resumed run needs and this rank owns: the rule's by parameter name, and master where
         the model's weights are of 16 bits. A tied weight beside its owner has none of its own. Views, or under
        ZeRO-1 whole copies on the host, from which `load_state` takes the shares; then collective over data parallel.
        """
        return {
            kind: {
                name: b.view(whole, name)
                for b, flat in zip(self.owned, flats, strict=True)
                for whole in [b.gathered(flat).cpu() if self.distributed else flat]
                for name in b.own
            }
            for kind, flats in self._kinds().items()
        }

    def load_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take this rank's shares of what `state` gave, once it holds what is to be loaded."""
        for kind, flats in self._kinds().items() if self.distributed else ():
            for b, flat in zip(self.owned, flats, strict=True):
                for name in b.own:
                    b.own_part(flat, name).copy_(b.share_of(state[kind][name], name))

    def _kinds(self) -> dict[str, list[Tensor]]:
        rounded = any(wide_of(b.model) != b.model.dtype for b in self.owned)
        return self.moments | ({"master": [b.main for b in self.owned]} if rounded else {})

    def reload_main(self) -> None:
        """Take the main parameters from the model's weights."""
        for buffers in self.owned:
            buffers.copy_model_to_main()

    def _send_to_twins(self, *, shares: bool = False) -> None:
        """The owners' weights, or this rank's share of them."""
        for source, buffers in self._twins:
            self.mesh.twins.broadcast(buffers.shard if shares else buffers.model, source)

    def update(
        self, gradients: Gradients, rates: Rates, shrink: float = 1.0, *, keeps_grads: bool = False
    ) -> Gradients:
        """Let the rule update what is owned here.

        Args:
            shrink: the factor of clipping.
            keeps_grads: scaling and clipping alone change gradients; rules that may do more are given copies.
        Returns: the gradients as they lie now, multiplied by both factors.
        """
        factors: Factors = (gradients.scale, shrink)
        # Of parts that are not flat the optimizer scales the gradients and rounds the weights.
        sweeps = self.rule.elementwise and getattr(self.rule, "sweeps", False)
        copies = keeps_grads and not getattr(self.rule, "keeps_grad", False)
        if copies or not sweeps:
            for b in self.owned:
                multiply(b.reduced, factors)
            factors = (1.0, 1.0)
        ends_lr = rates.lr if rates.ends_lr is None else rates.ends_lr
        decay = self.train.weight_decay if rates.weight_decay is None else rates.weight_decay
        parts = list[Part]()
        for n, b in enumerate(self.owned):
            flat = {kind: flats[n] for kind, flats in self.moments.items()}
            grads = b.reduced.clone() if copies else b.reduced
            for group, at_end, names, where in b.sections:
                own = (ends_lr if at_end else rates.lr) * group.lr, decay * group.weight_decay
                if self.rule.elementwise and where.start < where.stop:
                    state = {kind: x[where] for kind, x in flat.items()}
                    model = b.shard[where] if sweeps and b.rounds else None
                    tensors = b.main[where], grads[where], state
                    parts.append(Part(names, *tensors, *own, factors=factors, model=model))
                for name in () if self.rule.elementwise else names:
                    state = {kind: b.view(x, name) for kind, x in flat.items()}
                    value, grad, layout = b.view(b.main, name), b.view(grads, name), layout_of(self.params[name])
                    parts.append(Part((name,), value, grad, state, *own, layout, self.mesh.tp))
        if parts:
            self.rule.update(parts, self.steps)
        self.steps += 1
        self.spread(rounded=sweeps)
        return replace(gradients, scale=1.0)

    def spread(self, *, rounded: bool = False) -> None:
        """Make the model's weights of the main parameters, if the rule has not, here and where else they are."""
        for buffers in () if rounded else self.owned:
            buffers.copy_main_to_model()
        self._send_to_twins(shares=True)
        for finish in [buffers.start_gather() for buffers in self._stay]:
            finish()
        self.gathers.updated()
        if not self.gathers_later:
            self.gathers.settle()
        for chunk in self._sends:
            self.gathers.start(chunk)()
        self.ties.feed()
        for chunk in self._sends:
            self.gathers.drop(chunk)


def _zeros(buffers: FlatBuffers, kind: str, train: TrainConfig) -> Tensor:
    """A moment before the first step."""
    kept_as = {"exp_avg": dtype_of(train.exp_avg_dtype), "exp_avg_sq": dtype_of(train.exp_avg_sq_dtype)}
    return torch.zeros_like(buffers.main, dtype=kept_as.get(kind) or wide_of(buffers.main))
