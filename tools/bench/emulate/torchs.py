"""One step of a rank of emulated devices under torch.distributed.pipelining.

The import takes two seconds, so it is made only where torch's runtime is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.pipelining as peers

from tools.bench.emulate.runs import PEERS, Runner


class _StampingStage(peers.PipelineStage):
    """torch's stage, its messages stamped as they leave."""

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        return self._stamped(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        return self._stamped(super().get_bwd_send_ops(bwd_chunk_id))

    def _stamped(self, ops: Any) -> Any:
        layers: Any = self.submod
        for op in ops:
            layers.device.stamp(op.tensor)
        return ops


class Torchs(Runner):
    """torch.distributed.pipelining with its own PipelineStage and automatic split of the graph."""

    def prepare(self) -> None:
        place, pp, m = self.schedule.placement, self.mesh.pp, self.schedule.num_microbatches
        make: Any = getattr(peers, PEERS[self.schedule.name])
        modules = self.layers(split_by_autograd=any(kind.is_split for kind in self.schedule.kinds))
        hidden = torch.zeros(self.shape, requires_grad=True)
        data = gradient = hidden.detach()
        # Told everything about its tensors, torch need not find out by a forward and backward of
        # its own.
        stages = [
            _StampingStage(
                module,
                s,
                place.num_stages,
                pp.device,
                input_args=data if place.is_first(s) else hidden,
                output_args=hidden,
                output_grads=None if place.is_last(s) else gradient,
                input_grads=None if place.is_first(s) else gradient,
                group=pp.group,
            )
            for s, module in modules.items()
        ]
        whole_rank = (
            stages if issubclass(make, peers.schedules.PipelineScheduleMulti) else stages[0]
        )
        self.run = make(whole_rank, m, loss_fn=lambda out, _: out.mean())
        whole = torch.zeros(m * self.shape[0], *self.shape[1:])
        self.args = (whole,) if any(map(place.is_first, modules)) else ()
        self.kwargs = {"target": whole, "losses": []} if any(map(place.is_last, modules)) else {}

    def step(self) -> None:
        self.run.step(*self.args, **self.kwargs, return_outputs=False)
