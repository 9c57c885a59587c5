"""The optimizer: a rule over the flat buffers of a rank, with one view of the whole model's parameters.

A step does the same arithmetic in the same order under every layout: gradients are summed over data parallel and twins,
the two uses of a tied weight are added, and the norm is summed over the model's parameters in one global order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor, nn

from megapipe.config import TrainConfig
from megapipe.distributed.late import Late
from megapipe.distributed.layout import layout_of
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.optim.buckets import buckets_of
from megapipe.optim.buffers import FlatBuffers
from megapipe.optim.census import check_trained, frozen, natural, take_census, trained
from megapipe.optim.norm import Norm
from megapipe.optim.reduction import Reduction
from megapipe.optim.rule import Factors, Groups, Part, Rates, multiply, usual_groups
from megapipe.optim.rules import find_rule, split_problem, wide_of
from megapipe.optim.sharded.buffers import Live, ShardedBuffers
from megapipe.optim.sharded.gathers import Gathers
from megapipe.optim.sharded.storage import Storage, dtype_of, in_eight_bits, stays
from megapipe.optim.ties import Ties


class Optimizer:
    """A rule (rule.py: AdamW, or what --optimizer names) with clipping by the global norm.

    Constructing it moves the parameters into flat buffers and gives each a `main_grad`. Collective over the pipeline,
    as is every method that says so; `start_norm` and `update` are collective over the mesh.

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
        reduction: sums their gradients; what it has not begun by then, `start_norm` begins.
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
        self.distributed, self.gathers_later = distributed and mesh.dp_cp.size > 1, gathers_later
        if self.distributed and (problem := split_problem(train, self.rule)):
            raise ConfigError(problem)
        self.steps, self.live = 0, Live()
        self.params = dict(pair for stage in stages for pair in trained(stage))
        census, twins = everything = take_census(stages, mesh)
        if not train.freeze_all_layers:
            check_trained(census)
        self._frozen = frozen(stages, census, mesh)
        owners = sorted((row.name for row in census.values() if row.tied_to is None), key=natural)
        self.ties = ties = Ties(everything, self.params, mesh)
        lenders, self._sends = ties.of_chunks([[name for name, _ in trained(stage)] for stage in stages])
        self.chunks: list[list[FlatBuffers]] = [[] for _ in stages]
        self.owned, shared = list[FlatBuffers](), list[tuple[int, str, FlatBuffers]]()
        eight = in_eight_bits(stages) if eight_bits and self.distributed else {}
        data_parallel = mesh, self.live, self.distributed, shards_grads, shards_weights
        storage = Storage(train, groups, ties.names, eight, *data_parallel)
        rows = [n for n, param in self.params.items() if self.distributed and shards_grads and stays(param)]
        of_stages = [buckets_of(dict(trained(stage)), bucket_size, num_buckets, (eight, rows)) for stage in stages]
        for chunk, bucket in ((self.chunks[n], bucket) for n, of in enumerate(of_stages) for bucket in of):
            name = min(bucket.params, default="")
            here = name not in twins or census[name].rank == mesh.pp.rank
            buffers = storage.of(bucket.params, ties.borrowed, has_main=here)
            chunk.append(buffers)
            if here:
                self.owned.append(buffers)
            if name in twins:
                shared.append((mesh.twins.ranks.index(mesh.pp.ranks[census[name].rank]), name, buffers))
        self.buffers = [buffers for chunk in self.chunks for buffers in chunk]
        # (position of the owner in mesh.twins, buffers), in one order on both ranks
        self._twins = [(source, buffers) for source, _, buffers in sorted(shared, key=itemgetter(1))]
        twice, dtype = [twin for _, twin in self._twins], torch.bfloat16 if train.grad_reduce_in_bf16 else None
        self._norm = Norm(mesh, {name: n for n, name in enumerate(owners)}, self.params)
        ready = [[(x.first, x.layers) for x in of if x.params.keys().isdisjoint(rows)] for of in of_stages]
        comes = [b for b in self.buffers if isinstance(b, ShardedBuffers)]
        self._whole = [b for b in self.buffers if b.own and b.own[0] in rows]
        runs = [[b for b in chunk if b not in self._whole] for chunk in self.chunks] if self._whole else self.chunks
        self.reduction = Reduction(mesh, runs, ready, twice, self.params, ties, comes, self._whole, dtype)
        self.gathers = Gathers(runs, lenders, drops=self.distributed and shards_weights, in_eight_bits=bool(eight))
        self.moments = {kind: [_zeros(b, kind, train) for b in self.owned] for kind in self.rule.state}
        ties.share()
        self._send_to_twins()
        with self.gathers.whole():
            self.reload_main()

    def zero_grad(self) -> None:
        """Start a step."""
        for buffers in self.buffers:
            buffers.zero_grad()

    def start_norm(self, grad_scale: float | Tensor = 1.0) -> Late[float]:
        """Reduce what is not, and begin to take the norm of all ranks, as if it was scaled; `update` scales.

        A scale on the device is not read.
        """
        self.reduction.finish()
        return self._norm.start(self.owned, self._grads, grad_scale)

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
            self.mesh.twins.broadcast(buffers.own_weights if shares else buffers.model, source)

    def update(self, rates: Rates, factors: Factors = (1.0, 1.0), *, keeps_grads: bool = False) -> None:
        """Let the rule update what is owned here, by gradients that are summed.

        Args:
            factors: the gradients are multiplied by them where they lie, and stay so.
            keeps_grads: nothing else changes them; rules that may do so are given copies.
        """
        # Of parts that are not flat the optimizer scales the gradients and rounds the weights.
        sweeps = self.rule.elementwise and getattr(self.rule, "sweeps", False)
        copies = keeps_grads and not getattr(self.rule, "keeps_grad", False)
        if copies or not sweeps:
            for grad in self._grads:
                multiply(grad, factors)
            factors = 1.0, 1.0
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
                    model = b.own_weights[where] if sweeps and b.rounds else None
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

    def spread(self, *, rounded: bool = False) -> None:
        """Make the model's weights of the main parameters, if the rule has not, here and where else they are."""
        for buffers in () if rounded else self.owned:
            buffers.copy_main_to_model()
        self._send_to_twins(shares=True)
        for finish in [buffers.start_gather() for buffers in self._whole]:
            finish()
        self.gathers.updated()
        if not self.gathers_later:
            self.gathers.settle()
        for chunk in self._sends:
            self.gathers.start(chunk)()
        self.ties.feed()
        for chunk in self._sends:
            self.gathers.drop(chunk)

    @property
    def _grads(self) -> list[Tensor]:
        return [b.reduced if self.distributed else b.grads for b in self.owned]


def _zeros(buffers: FlatBuffers, kind: str, train: TrainConfig) -> Tensor:
    """A moment before the first step."""
    kept_as = {"exp_avg": dtype_of(train.exp_avg_dtype), "exp_avg_sq": dtype_of(train.exp_avg_sq_dtype)}
    return torch.zeros_like(buffers.main, dtype=kept_as.get(kind) or wide_of(buffers.main))
