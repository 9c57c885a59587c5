"""A step without a lost rank runs: its peers compute the same losses and gradients, to the bit, with real messages."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import nn

from megapipe.pipeline_parallel.execute import execute
from megapipe.pipeline_parallel.messages.messenger import Messenger
from megapipe.pipeline_parallel.passes.begin import Ends
from megapipe.pipeline_parallel.request import Request
from megapipe.pipeline_parallel.stage import PipelineStage
from megapipe.pipeline_parallel.stopwatch import Stopwatch
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import Costs, build, lower, simulate, verify
from megapipe.schedule.core.joint import joint, joint_costs
from megapipe.schedule.core.reroute import reroute

COSTS = Costs(1.0, 1.0, 1.0)
SHAPE = (3, 1, 8)


class Part(nn.Module):
    """A stage of one microbatch; stages of one replica and position have one layer."""

    def __init__(self, layer, x):
        super().__init__()
        self.layer, self.x, self.given = layer, x, None

    def set_input_tensor(self, x):
        self.given = x

    def forward(self):
        return torch.tanh(self.layer(self.x if self.given is None else self.given))


def data(number):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))


def layer_of(position):
    layer = nn.Linear(SHAPE[-1], SHAPE[-1], bias=False)
    # Ranks are threads, and torch's seed is everyone's.
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(position))
    return layer


def trained(table, replicas):
    """Run a joint table; return {(replica, position): gradients by rank} and {microbatch: loss}."""
    place = table.placement

    def body(mesh):
        layers, stages, losses = {}, {}, {}
        for number in place.stages_on(mesh.pp.rank):
            microbatch, position = number // place.chain, place.position(number)
            # The replica of a peer has a buffer for gradients of its own.
            key = (microbatch % replicas, position)
            layers.setdefault(key, layer_of(position))
            part = Part(layers[key], data(microbatch))

            def forward(_, model, microbatch=microbatch):
                def loss(out):
                    value = (out - 0.1).square().mean()
                    losses[microbatch] = value.detach().clone()
                    return value, {}

                return model(), loss

            request = Request(
                forward_step_func=forward,
                data_iterator=None,
                model=[part],
                num_microbatches=table.num_microbatches,
                seq_length=None,
                micro_batch_size=None,
            )
            ends = Ends(holds_loss=place.is_last(number))
            stages[number] = PipelineStage(request, part, None, mesh=mesh, number=number, ends=ends)
        comm = Messenger(mesh.pp, SHAPE, torch.float32)
        execute(lower(table, COSTS)[mesh.pp.rank], place, stages, comm, watch=Stopwatch(mesh.device))
        return {key: layer.weight.grad for key, layer in layers.items()}, losses

    grads, losses = {}, {}
    for of_rank, own in run_threads(body, pp=place.num_ranks):
        losses |= own
        for key, grad in of_rank.items():
            grads.setdefault(key, []).append(grad)
    return grads, losses


def plain(chain, replicas, microbatches):
    """Do the same in plain torch, without a pipeline: (losses by microbatch, gradients by replica and position)."""
    losses, grads = {}, {}
    for replica in range(replicas):
        layers = [layer_of(position) for position in range(chain)]
        for number in range(replica, replicas * microbatches, replicas):
            x = data(number)
            for layer in layers:
                x = torch.tanh(layer(x))
            loss = (x - 0.1).square().mean()
            losses[number] = loss.detach()
            (loss / (replicas * microbatches)).backward()
        grads |= {(replica, position): layer.weight.grad for position, layer in enumerate(layers)}
    return losses, grads


@pytest.mark.parametrize("seed", range(24 if os.environ.get("MEGAPIPE_NIGHTLY") else 4))
def test_a_step_without_a_rank_has_the_losses_and_gradients_of_the_whole_one(seed):
    draw = random.Random(seed)
    name = draw.choice(["1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved", "zb-v"])
    replicas, ranks = draw.choice([(2, 2), (2, 3), (3, 2)])
    table = build(name, ranks, ranks * draw.choice([1, 2]))
    gone = (draw.randrange(replicas), draw.randrange(ranks))
    # With this limit peers run the lost rank's passes in blocks.
    memory = draw.choice([None, max(simulate(table, COSTS).peak)])
    found = reroute(table, replicas, gone, COSTS, memory)
    verify(found, costs=joint_costs(COSTS, table), memory=memory)
    expected, losses = trained(joint(table, replicas), replicas)
    grads, others = trained(found, replicas)
    assert losses.keys() == others.keys() == set(range(replicas * table.num_microbatches))
    assert all(torch.equal(losses[n], others[n]) for n in losses)
    wanted, gradients = plain(table.placement.chain, replicas, table.num_microbatches)
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close({key: whole for key, (whole,) in expected.items()}, gradients)
    assert grads.keys() == expected.keys()
    for key, (whole,) in expected.items():
        if len(grads[key]) == 1:
            assert torch.equal(whole, grads[key][0])
        else:
            # Several peers have a part of the lost rank's microbatches each, so these are summed in another order.
            assert (key[0], len(grads[key])) == (gone[0], replicas - 1)
            torch.testing.assert_close(sum(grads[key]), whole, rtol=1e-5, atol=1e-7)
