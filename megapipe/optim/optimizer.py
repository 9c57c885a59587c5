"""The optimizer: a rule over the flat buffers of a rank, with one view of the whole model.

A step does the same arithmetic in the same order under every layout. Gradients are summed over data
parallelism and DualPipe's replicas, and the gradients of a tied weight are added. The norm is
summed over the model's parameters in one order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from megapipe.config import OptimizerConfig
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
from megapipe.optim.rules import find_rule, wide_of
from megapipe.optim.sharded.gathers import Gathers
from megapipe.optim.sharded.saved import Saved, SavedShard
from megapipe.optim.sharded.storage import Storage, dtype_of, in_eight_bits
from megapipe.optim.ties import Ties
from megapipe.optim.traits import split_problem


@dataclass(frozen=True)
class Gradients:
    """The norm and the scale of a step's gradients. `Optimizer.buffers` has the gradients.

    Attributes:
        norm: L2 norm of all gradients of the model, with `scale` applied, before clipping.
        scale: factor by which `update` still has to multiply the gradients.
    """

    norm: Late[float]
    scale: float | Tensor


class Optimizer:
    """An optimizer with clipping by the global norm: AdamW, or what --optimizer names.

    The constructor moves parameters into flat buffers and gives each a `main_grad`. Parameters with
    requires_grad False are left alone. The constructor is collective over the pipeline; `reduce`
    and `update` are collective over the mesh. `saved`, `state` and `loaded` are for checkpoints,
    and `params_norm` and `count_zeros` for the log.

    Under DualPipe a stage exists twice, on mirrored ranks, which sum their gradients. One of them,
    the owner, has main parameters and state, updates, and sends the weights to the other rank. Norm
    and checkpoint thus see each parameter once.

    Args:
        stages: this rank's stages in ascending order. A parameter's name is unique in the model.
        flags: the optimizer's flags.
        mesh: this rank's mesh.
        groups: gives each parameter's factors on learning rate and weight decay.
        distributed: ZeRO-1: each data-parallel rank has main parameters and state only for its
            share. The trained weights are bitwise equal to those without ZeRO.
        shards_grads: ZeRO-2: full gradients exist only while passes use them.
        shards_weights: ZeRO-3: full weights exist only while passes use them.
        eight_bits: gather quantised weights in 8 bits.
        gathers_later: leave updated weights to be gathered by the next step's passes, or by
            `gathers.settle`.
        reduces_in_bf16: round gradients to bfloat16 for the sums over ranks.
        bucket_size: number of gradient elements that are summed over data parallelism at once, at
            least. None for no limit.
        num_buckets: number of buckets of each stage, instead of `bucket_size`; or None.

    Attributes:
        chunks: for each stage, its buckets in the order in which their gradients are complete.
        buffers: all buckets.
        gathers: gathers the weights.
        reduction: returns a new Reduction for a step's gradients.
        owned: the buckets with main parameters and state on this rank: all, or half under DualPipe.
        moments: the optimizer state: {name, such as exp_avg: [a flat tensor for each bucket in
            `owned`]}.
        live: counts the bytes of sharded tensors that are full at the moment.
        steps: number of updates so far, which Adam's bias correction needs.

    Raises: ConfigError for names that occur twice, tied weights that do not fit together,
        parameters of several types, or if nothing is trained. Also for an unknown optimizer, or one
        that ZeRO cannot split.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        flags: OptimizerConfig,
        mesh: ProcessMesh,
        *,
        groups: Groups = usual_groups,
        distributed: bool = False,
        shards_grads: bool = False,
        shards_weights: bool = False,
        eight_bits: bool = False,
        gathers_later: bool = False,
        reduces_in_bf16: bool = False,
        bucket_size: int | None = None,
        num_buckets: int | None = None,
    ) -> None:
        self.mesh = mesh
        self.flags = flags
        self.rule = find_rule(flags)
        self.distributed = distributed and mesh.dp_cp.size > 1
        self.gathers_later = gathers_later
        # Before anything collective: every rank has equal flags and raises the same error.
        problem = split_problem(flags, self.rule.elementwise)
        if self.distributed and problem:
            raise ConfigError(problem)
        census = take_census(stages, mesh)
        if not flags.freeze_all_layers:
            check_trained(census.owners)
        self._frozen = frozen(stages, census.owners, mesh)
        self.params = dict(pair for stage in stages for pair in trained(stage))
        self.ties = ties = Ties(census, self.params, mesh)
        self.live = Gauge()
        self.steps = 0
        eight = in_eight_bits(stages) if eight_bits and self.distributed else {}
        shards = (self.distributed, shards_grads, shards_weights)
        storage = Storage(flags, groups, ties, self.live, *shards, eight, bucket_size, num_buckets)
        layout = storage.layout(stages)
        self.chunks = [list(map(storage.buffers, chunk)) for chunk in layout]
        self.buffers = [buffers for chunk in self.chunks for buffers in chunk]
        stored = list(zip(chain.from_iterable(layout), self.buffers, strict=True))
        self.owned = [buffers for where, buffers in stored if where.here]
        self._stay = [buffers for where, buffers in stored if where.stays]
        # Replicas as (position of the owner in mesh.twins, buffers). Sorted by name, so that both
        # ranks sum and send them in one order.
        by_name = sorted(stored, key=lambda pair: pair[0].name)
        self._twins = [(where.owner, b) for where, b in by_name if where.owner is not None]
        # Without the buckets that stay: they are reduced and gathered at the end of a step.
        runs: list[list[FlatBuffers]] = []
        ready: list[list[tuple[int, int]]] = []
        for own, placed in zip(self.chunks, layout, strict=True):
            runs.append([b for b, where in zip(own, placed, strict=True) if not where.stays])
            ready.append([(x.bucket.first, x.bucket.layers) for x in placed if not x.stays])
        twins = [buffers for _, buffers in self._twins]
        dtype = torch.bfloat16 if reduces_in_bf16 else None
        self.reduction = partial(Reduction, runs, ready, twins, ties, self._stay, dtype)
        self._norm = Norm(mesh, census.order, self.params)
        names = [list(dict(trained(stage))) for stage in stages]
        needed, self._sends = ties.of_chunks(names)
        drops = self.distributed and shards_weights
        self.gathers = Gathers(runs, needed, drops=drops, in_eight_bits=bool(eight))
        self.moments: dict[str, list[Tensor]] = {}
        for kind in self.rule.state:
            self.moments[kind] = [_zeros(b, kind, flags) for b in self.owned]
        # Equal weights everywhere before the first step: each rank has initialised its own.
        tied = [n for n, own in enumerate(names) if not ties.across_ranks.isdisjoint(own)]
        with self.gathers.whole(tied):
            ties.share()
        self._send_to_twins()
        # Main parameters are made last, of weights that are final.
        self.reload_main()

    def zero_grad(self) -> None:
        """Set the gradients to zero at the start of a step."""
        for buffers in self.buffers:
            buffers.zero_grad()

    def reduce(self, scale: float | Tensor = 1.0, sums: Reduction | None = None) -> Gradients:
        """Finish the sums of the gradients and start to compute their norm.

        Gradients are not multiplied by `scale` yet; `update` does that.

        Args:
            scale: factor on the gradients. If it is a tensor, the host does not wait for it.
            sums: the `Reduction` with which the step's passes have begun to sum; None if none has
                begun.
        """
        if sums is None:
            sums = self.reduction()
        sums.finish()
        norm = self._norm.start(self.owned, [b.reduced for b in self.owned], scale)
        return Gradients(norm, scale)

    def count_zeros(self) -> int:
        """Return the number of gradient elements that are 0. Collective over the mesh."""
        return self._norm.zeros(self.owned, split=self.distributed)

    def shrink(self, norm: float) -> float:
        """Return the factor of --clip-grad on gradients with this norm."""
        # torch.nn.utils.clip_grad_norm_ has the same 1e-6.
        if self.flags.clip_grad > 0:
            return min(1.0, self.flags.clip_grad / (norm + 1e-6))
        return 1.0

    def params_norm(self) -> float:
        """Return the L2 norm of all parameters, frozen ones included. Collective over the mesh.

        Tied and replicated parameters count once.
        """
        trained = self._norm.start(self.owned, [b.main for b in self.owned])()
        if self._frozen is None:
            return trained
        return math.hypot(trained, self._norm.of_frozen(self._frozen))

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors that a resumed run needs and this rank owns.

        The result is {name of a state, such as exp_avg: {parameter: tensor}}. If the model has
        16-bit weights, the main parameters are added under "master". A tied parameter without
        optimizer state, such as a head on the rank of its embedding, is left out.

        Tensors are views. Under ZeRO-1 they are full copies on the host, and the call is collective
        over data parallelism.
        """
        saved = self.saved()
        for shard in saved.shards:
            shard.allocate()
            shard.copy(shard.gather())
        return saved.state

    def saved(self, *, with_state: bool = True) -> Saved:
        """Return the tensors of this rank in a checkpoint. Sharded ones have no memory yet.

        A save gives these memory where a rank writes them, and gathers one shard at a time. A load
        reads one shard at a time.

        Args:
            with_state: whether the optimizer's state is in the checkpoint, or weights alone.
        """
        saved = Saved({}, {}, [])
        for b in self.buffers:
            if b.drops:
                shard = SavedShard(b, b.shard)
                saved.shards.append(shard)
                saved.weights.update(shard.full)
        kinds = self._kinds() if with_state else {}
        for kind, flats in kinds.items():
            state = saved.state.setdefault(kind, {})
            for b, flat in zip(self.owned, flats, strict=True):
                if b.shares.size == 1:
                    state.update((name, b.view(flat, name)) for name in b.own)
                else:
                    shard = SavedShard(b, flat)
                    saved.shards.append(shard)
                    state.update(shard.full)
        return saved

    def loaded(self) -> None:
        """Use the weights that a load has written. Collective over data parallelism."""
        self.gathers.updated()
        if not self.gathers_later:
            self.gathers.settle()

    def flats(self, chunk: int) -> list[Tensor]:
        """Return the flat tensors of a stage that an update changes and this rank owns.

        These are the main parameters and the optimizer state, such as Adam's moments.
        Whoever changes them calls `spread`, which updates the model's weights.

        Args:
            chunk: position of the stage on this rank.
        """
        return [flat for _, flat in self.placed_flats(chunk)]

    def placed_flats(self, chunk: int) -> list[tuple[FlatBuffers, Tensor]]:
        """Return [(buffers of the bucket, flat tensor)] for each tensor of `flats(chunk)`."""
        own = self.chunks[chunk]
        found = []
        for n, b in enumerate(self.owned):
            if any(b is one for one in own):
                flats = (b.main, *(flats[n] for flats in self.moments.values()))
                found += [(b, flat) for flat in flats]
        return found

    def _kinds(self) -> dict[str, list[Tensor]]:
        """Return {name of a state: a flat tensor for each bucket in `owned`}, to be saved."""
        kinds = dict(self.moments)
        if any(wide_of(b.model) != b.model.dtype for b in self.owned):
            kinds["master"] = [b.main for b in self.owned]
        return kinds

    def reload_main(self) -> None:
        """Set the main parameters to the model's weights."""
        for buffers in self.owned:
            buffers.copy_model_to_main()

    def _send_to_twins(self, *, shares: bool = False) -> None:
        """Send weights from the rank that updates them to DualPipe's other rank with the stage.

        Args:
            shares: send only this rank's ZeRO share of each weight; otherwise also the others that
                it has.
        """
        for source, buffers in self._twins:
            weights = buffers.shard if shares or buffers.drops else buffers.model
            self.mesh.twins.broadcast(weights, source)

    def update(
        self, gradients: Gradients, rates: Rates, shrink: float = 1.0, *, keeps_grads: bool = False
    ) -> Gradients:
        """Update this rank's parameters, and send the new weights to the other ranks.

        Args:
            gradients: the result of `reduce`.
            rates: learning rates and weight decay.
            shrink: factor on the gradients from clipping by the norm.
            keeps_grads: the caller reads the gradients afterwards. An optimizer that would
                overwrite them then gets copies.
        Returns: the gradients, multiplied by gradients.scale and by `shrink`.
        """
        factors: Factors = (gradients.scale, shrink)
        # Only a rule for flat parts can multiply and round in its sweep. For any other rule the
        # optimizer does both.
        sweeps = self.rule.elementwise and getattr(self.rule, "sweeps", False)
        copies = keeps_grads and not getattr(self.rule, "keeps_grad", False)
        if copies or not sweeps:
            for b in self.owned:
                multiply(b.reduced, factors)
            factors = (1.0, 1.0)
        ends_lr = rates.lr if rates.ends_lr is None else rates.ends_lr
        decay = self.flags.weight_decay if rates.weight_decay is None else rates.weight_decay
        parts = list[Part]()
        for n, b in enumerate(self.owned):
            flat = {kind: flats[n] for kind, flats in self.moments.items()}
            # Copies are made after the multiplication: the originals keep the factors' result.
            grads = b.reduced.clone() if copies else b.reduced
            for group, at_end, names, where in b.sections:
                lr = (ends_lr if at_end else rates.lr) * group.lr
                own = (lr, decay * group.weight_decay)
                if not self.rule.elementwise:
                    for name in names:
                        state = {kind: b.view(x, name) for kind, x in flat.items()}
                        tensors = (b.view(b.main, name), b.view(grads, name), state)
                        layout = layout_of(self.params[name])
                        parts.append(Part((name,), *tensors, *own, layout, self.mesh.tp))
                # A share may have nothing of a section.
                elif where.start < where.stop:
                    state = {kind: x[where] for kind, x in flat.items()}
                    model = b.shard[where] if sweeps and b.rounds else None
                    tensors = (b.main[where], grads[where], state)
                    parts.append(Part(names, *tensors, *own, factors=factors, model=model))
        if parts:
            self.rule.update(parts, self.steps)
        # A rank without parameters counts steps too: a checkpoint has one number for all ranks.
        self.steps += 1
        self.spread(rounded=sweeps)
        return replace(gradients, scale=1.0)

    def spread(self, *, rounded: bool = False) -> None:
        """Round main parameters to the model's weights, and send these to all ranks that hold them.

        Args:
            rounded: whether the weights have been rounded already, by the update.
        """
        if not rounded:
            for buffers in self.owned:
                buffers.copy_main_to_model()
        self._send_to_twins(shares=True)
        # All gatherings start before the first one is waited for.
        for finish in [buffers.start_gather() for buffers in self._stay]:
            finish()
        self.gathers.updated()
        if not self.gathers_later:
            self.gathers.settle()
        # Weights that are sent to ranks without state for them must be gathered for the moment.
        for chunk in self._sends:
            self.gathers.start(chunk)()
        self.ties.feed()
        for chunk in self._sends:
            self.gathers.drop(chunk)


def _zeros(buffers: FlatBuffers, kind: str, flags: OptimizerConfig) -> Tensor:
    """Return zeros of the shape of `buffers.main`, the first values of the state `kind`.

    Args:
        kind: name of the state, such as exp_avg.
        flags: the optimizer's flags, which may ask for another type.
    """
    dtypes = {
        "exp_avg": dtype_of(flags.exp_avg_dtype),
        "exp_avg_sq": dtype_of(flags.exp_avg_sq_dtype),
    }
    dtype = dtypes.get(kind) or wide_of(buffers.main)
    return torch.zeros_like(buffers.main, dtype=dtype)
