"""A model without room for it is one sentence with what the plan says; any other error stays what it is."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import short_run
import torch
from tiny import STYLES

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.groups import buffer_bytes, links_of, num_links
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.messages.transport import Op, Transport
from megapipe.plan import GIB, make_plan
from megapipe.training.guards.model import fits, room


def test_a_model_that_no_memory_holds_is_refused_with_what_it_needs():
    mesh, plan = ProcessMesh.single(), make_plan(short_run.config(STYLES["gpt2"]))
    needed = re.escape(f"{plan.peak_bytes[0] / 2**30:,.3g}")
    sentence = rf"^rank 0 has no memory for its stages, which need {needed} GiB by the plan\. Use"
    for sizes in ((2**60,), (2**40, 2**40), (10**20, 2)):  # more than there is, bytes and rows beyond 64 bits
        with pytest.raises(ConfigError, match=sentence), room(mesh, plan):
            torch.empty(sizes)
    with pytest.raises(RuntimeError, match="shape"), room(mesh, plan):
        torch.zeros(2).view(3)


class Group:
    """A process group, of which only the size is asked."""

    def __init__(self, ranks):
        self.size = lambda: ranks


def test_the_memory_of_communicators_stands_beside_the_plans():
    """By NCCL's constants: 9,408 KiB a channel from a rank; tp and dp of 2 from one, 8 ranks of the world from two."""
    everyone, links = Group(8), [Group(4) for _ in range(4)]
    two = [Axis(0, 2, (0, 1), Group(2)) for _ in range(2)]
    pp = Axis(3, 4, (0, 2, 4, 6), links[0], links=tuple(links[1:]))
    mesh = ProcessMesh(tp=two[0], dp=two[1], pp=pp, world=Axis(6, 8, tuple(range(8)), everyone))
    beside = 9408 * 1024 * (32 * (1 + 1 + 2 + 2) + 2 * 2)
    said = f"rank 6: 7 communicators of NCCL, 3 of them links, take up to {beside / GIB:.1f} GiB of its GPU's 80"
    assert fits(70 * GIB, mesh, 80 * GIB) == f" > {said} in addition to the plan's 70"
    too_much = f"WARNING: {said} in addition to the plan's 79, more than there is: it may run"
    assert fits(79 * GIB, mesh, 80 * GIB).startswith(too_much)


def test_messages_of_a_shared_vocabulary_need_few_buffers_from_every_rank():
    """Eight ranks: 2.0 GiB on the pipeline's communicator, whose every channel has buffers for each other rank."""
    parallel = ParallelConfig(pipeline_model_parallel_size=8, vocab_parallel_pipeline=True)
    assert links_of(parallel) == 1 + num_links(8)
    assert buffer_bytes([], [8]) / GIB == pytest.approx(2.01, abs=0.005)
    assert buffer_bytes([], senders=7) / GIB == pytest.approx(0.126, abs=0.0005)


def test_a_message_beyond_neighbours_takes_the_last_link():
    """On the pipeline's own communicator receives waited on 9.98 blocks as a mean beside the passes of 1f1b at pp 8."""
    links = tuple(SimpleNamespace(send=lambda *_, n=n: n) for n in range(5))
    pp = Axis(0, 8, tuple(range(8)), SimpleNamespace(send=lambda *_: "pp"), torch.device("cuda"), links=links)
    assert [Transport(pp).one(Op(True, peer, torch.zeros(1))) for peer in (1, 7, 4)] == [1, 3, 4]
    without = replace(pp, links=links[:4])
    assert Transport(without).one(Op(True, 4, torch.zeros(1))) == "pp"
    assert Transport(pp).receives_ahead.peers == {1, 7}
