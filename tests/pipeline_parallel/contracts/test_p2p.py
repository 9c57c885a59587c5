"""Messages reach whom they are for: every mode, every schedule, transports that wait, Megatron's nine methods."""

from __future__ import annotations

import os
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.contracts import p2p
from megapipe.pipeline_parallel.contracts.p2p import P2PCommunicator
from megapipe.pipeline_parallel.messages.messenger import Messenger
from megapipe.pipeline_parallel.messages.transport import Op, P2PMode, Transport
from megapipe.pipeline_parallel.threads import run_threads
from megapipe.schedule import SCHEDULES, Program, Schedule, ScheduleError, build, lower, unpaired

from ..relay import Done, Queues, Rendezvous, Void, Wires, relay

RANKS = [2, 3, 4, 8]
# scripts/nightly.sh: every schedule on eight ranks, every mode on 2, 3 and 4, all lengths.
NIGHTLY = bool(os.environ.get("MEGAPIPE_NIGHTLY"))
OF_EIGHT = list(SCHEDULES) if NIGHTLY else ["interleaved", "zb-v", "hanayo", "dualpipe"]
RANKS_AND_MODES = [(p, mode) for mode in P2PMode for p in RANKS if p < 8 or mode is P2PMode.PLAIN]
if not NIGHTLY:
    RANKS_AND_MODES = [(2, P2PMode.BATCHED), (2, P2PMode.RING), (4, P2PMode.RING), *((p, P2PMode.PLAIN) for p in RANKS)]


@cache
def every_schedule(p: int) -> list[tuple[Schedule, tuple[Program, ...]]]:
    """All of the catalogue that p ranks can run, of eight a spread, with 2p microbatches, and their ranks' programs."""
    found = []
    for name in OF_EIGHT if p == 8 else SCHEDULES:
        entry = SCHEDULES[name]
        if "costs" not in entry.generate.__code__.co_varnames:  # a search of seconds
            try:
                found.append(build(name, p, 2 * p))
            except ScheduleError:
                assert (entry.copies, p % 2) == (2, 1)
    return [(schedule, lower(unpaired(schedule))) for schedule in found]


@pytest.mark.parametrize(("p", "mode"), RANKS_AND_MODES)
def test_every_schedule_delivers_every_message_over_gloo(p, mode):
    """With fixed or variable lengths in turn, another turn in each mode; nightly with both, but for eight ranks."""
    turn = list(P2PMode).index(mode)

    def body(mesh: ProcessMesh) -> None:
        for n, table in enumerate(every_schedule(p)):
            for variable in (False, True) if NIGHTLY and p < 8 else ((n + turn) % 2 == 1,):
                relay(mesh, *table, Transport(mesh.pp, mode), variable=variable)

    run_threads(body, pp=p, timeout_s=30)


@pytest.mark.parametrize("both", [False, True], ids=["sends-wait", "one-at-a-time"])
@pytest.mark.parametrize(("p", "mode"), RANKS_AND_MODES)
def test_every_schedule_completes_where_sends_wait_for_their_receives(p, mode, both):
    wires = [Wires() for _ in every_schedule(p)]
    lengths = (False, True) if NIGHTLY and p < 8 else (both,)

    def body(mesh: ProcessMesh) -> None:
        for (schedule, programs), wire in zip(every_schedule(p), wires, strict=True):
            for variable in lengths:
                relay(mesh, schedule, programs, Rendezvous(mesh.pp, mode, wire, both=both), variable=variable)

    run_threads(body, pp=p, timeout_s=30)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_every_schedule_completes_on_serial_links_with_receives_posted_ahead(p):
    wires = [Wires() for _ in every_schedule(p)]

    def body(mesh: ProcessMesh) -> None:
        for (schedule, programs), wire in zip(every_schedule(p), wires, strict=True):
            transport = Queues(mesh.pp, P2PMode.PLAIN, wire)
            relay(mesh, schedule, programs, transport)
            transport.close()

    run_threads(body, pp=p, timeout_s=30)


def comm_of(mesh: ProcessMesh, mode: str, **options: bool) -> P2PCommunicator:
    """As Megatron's config says it: constructed from the process group."""
    modes = {"use_ring_exchange_p2p": mode == "ring", "batch_p2p_comm": mode != "plain"}
    return P2PCommunicator(mesh.pp.group, SimpleNamespace(pipeline_dtype=torch.float32, **modes, **options))


def full(number: float, length: int = 2) -> Tensor:
    return torch.full((length, 1, 3), float(number))


@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
@pytest.mark.parametrize("mode", P2PMode)
@pytest.mark.parametrize("p", RANKS)
def test_all_four_directions_at_once_bring_the_right_neighbours_tensors(p, mode, variable):
    def body(mesh: ProcessMesh) -> None:
        rank, comm = mesh.pp.rank, comm_of(mesh, mode, variable_seq_lengths=variable)
        length = (lambda r: 1 + r) if variable else (lambda r: 2)
        for turn in range(3):
            mine = rank + 100 * turn
            below, above = comm.send_forward_backward_recv_forward_backward(
                full(mine, length(rank)), full(-mine - 0.5, length(rank)), True, True, (2, 1, 3)
            )
            before, after = (rank - 1) % p, (rank + 1) % p
            torch.testing.assert_close(below.detach(), full(before + 100 * turn, length(before)))
            torch.testing.assert_close(above.detach(), full(-after - 100 * turn - 0.5, length(after)))

    run_threads(body, pp=p, timeout_s=30)


@pytest.mark.parametrize("mode", P2PMode)
@pytest.mark.parametrize("p", [2, 4])
def test_megatrons_one_f_one_b_loop_runs_on_its_methods(p, mode):
    """Warm-up, pairs, cool-down: each stage adds 1 going up and 10 going down."""

    def body(mesh: ProcessMesh) -> None:
        comm, shape, m = comm_of(mesh, mode), (2, 1, 3), 6
        first, last = mesh.pp.rank == 0, mesh.pp.rank == p - 1
        warmup = min(p - 1 - mesh.pp.rank, m)

        def forward(x: Tensor | None, microbatch: int) -> Tensor:
            assert (x is None) == first
            x = full(microbatch) if x is None else x
            assert x.eq(microbatch + mesh.pp.rank).all()
            return x.detach() + 1

        def backward(grad: Tensor | None, microbatch: int) -> Tensor:
            assert (grad is None) == last
            grad = full(microbatch) if grad is None else grad
            assert grad.eq(microbatch + 10 * (p - 1 - mesh.pp.rank)).all()
            return grad.detach() + 10

        for i in range(warmup):
            comm.send_forward(forward(comm.recv_forward(shape, first), i), last)
        x = comm.recv_forward(shape, first)
        for i in range(m - warmup):
            grad = comm.send_forward_recv_backward(forward(x, warmup + i), shape, last)
            below = backward(grad, i)
            if i == m - warmup - 1:
                comm.send_backward(below, first)
            else:
                x = comm.send_backward_recv_forward(below, shape, first)
        for i in range(m - warmup, m):
            comm.send_backward(backward(comm.recv_backward(shape, last), i), first)

    run_threads(body, pp=p, timeout_s=30)


@pytest.mark.parametrize("p", [2, 3])
def test_overlapped_calls_return_handles_to_wait_for(p):
    def body(mesh: ProcessMesh) -> None:
        rank, comm = mesh.pp.rank, comm_of(mesh, "plain")
        x, up = comm.send_forward_recv_forward(full(rank), True, (2, 1, 3), overlap_p2p_comm=True)
        grad, down = comm.send_backward_recv_backward(full(-rank), True, (2, 1, 3), overlap_p2p_comm=True)
        assert set(up) == {"send_next", "recv_prev"}
        assert set(down) == {"send_prev", "recv_next"}
        for handle in (*up.values(), *down.values()):
            handle.wait()
        assert x.requires_grad
        assert x.eq((rank - 1) % p).all()
        assert grad.eq(-((rank + 1) % p)).all()

    run_threads(body, pp=p, timeout_s=30)


def test_lists_of_shapes_and_tensors_go_one_by_one_as_megatron_takes_them():
    def body(mesh: ProcessMesh) -> None:
        comm, first, last = comm_of(mesh, "batched"), mesh.pp.rank == 0, mesh.pp.rank == 1
        assert (comm.is_pp_first_stage, comm.is_pp_last_stage) == (first, last)
        assert (comm.total_stages, comm.current_stage, comm.next_rank) == (2, mesh.pp.rank, 1 - mesh.pp.rank)
        got = comm.recv_forward([(1, 1, 3), (2, 1, 3)], first)
        assert got == [None, None] if first else [x.shape[0] for x in got] == [1, 2]
        comm.send_forward([full(1, 1), full(2, 2)], last)
        grads = comm.recv_backward([(1, 1, 3)], last)
        comm.send_backward([full(7, 1)], first)
        assert grads == [None] if last else grads[0].eq(7).all()
        assert comm.send_forward_recv_backward([full(3, 1)], [(1, 1, 3)], last) is not None or last
        if last:
            assert comm.send_backward_recv_forward([full(4, 1)], [(1, 1, 3)], first)[0].eq(3).all()

    run_threads(body, pp=2, timeout_s=30)


def test_a_receive_without_pipeline_dtype_is_refused_by_name():
    comm = P2PCommunicator(Axis(1, 2, (0, 1)), SimpleNamespace())
    with pytest.raises(ConfigError, match=r"config\.pipeline_dtype must say the type"):
        comm.recv_forward((2, 1, 3), False)


def test_ring_mode_names_all_directions_in_one_native_call(monkeypatch):
    calls: list[dict[str, Tensor]] = []
    monkeypatch.setattr(torch.distributed, "ring_exchange", lambda group, **named: calls.append(named), raising=False)
    axis = Axis(1, 4, (0, 1, 2, 3))
    ops = [
        Op(True, 2, full(0)),
        Op(False, 0, full(1)),
        Op(True, 0, full(2)),
        Op(False, 2, full(3)),
        Op(True, 2, full(4)),
    ]
    Transport(axis, "ring").post(ops)
    assert [sorted(call) for call in calls] == [
        ["tensor_recv_next", "tensor_recv_prev", "tensor_send_next", "tensor_send_prev"],
        ["tensor_send_next"],
    ]
    assert calls[0]["tensor_send_next"] is ops[0].tensor
    assert calls[0]["tensor_recv_next"] is ops[3].tensor


def test_a_ring_completes_as_a_unit(monkeypatch):
    waited: list[int] = []

    class Counting(Void):
        def one(self, op: Op) -> Done:
            done = super().one(op)
            done.wait = lambda: waited.append(op.peer)
            return done

    axis = Axis(1, 3, (0, 1, 2))
    handles = Counting(axis, "ring").post([Op(True, 2, full(0)), Op(False, 0, full(1))])
    handles[1].wait()
    assert sorted(waited) == [0, 2]
    handles[0].wait()
    assert sorted(waited) == [0, 2], "gloo would wait for another message"


@pytest.mark.parametrize("mode, syncs", [("batched", 1), ("plain", 0)])
def test_batch_p2p_sync_synchronizes_after_a_batch(monkeypatch, mode, syncs):
    seen: list[torch.device] = []
    monkeypatch.setattr(p2p, "synchronize", seen.append)
    axis = Axis(1, 3, (0, 1, 2))
    config = SimpleNamespace(pipeline_dtype=torch.float32, batch_p2p_comm=mode == "batched", batch_p2p_sync=True)
    comm = P2PCommunicator(axis, config)
    comm.transport = Void(axis, mode)
    comm.recv_forward((2, 1, 3), False)
    assert len(seen) == syncs


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe"])
def test_links_open_in_one_order_on_all_ranks(monkeypatch, name):
    monkeypatch.setattr(Axis, "barrier", lambda self: None)
    placement = build(name, 4, 8).placement

    def links(rank: int) -> list[tuple[int, int]]:
        axis = Axis(rank, 4, (0, 1, 2, 3))
        void = Void(axis)
        comm = Messenger(axis, (1, 1, 1), torch.float32, transport=void)
        comm.open_links(placement)
        return [(rank, op.peer) if op.sends else (op.peer, rank) for op in void.posted]

    used = [(0, 1), (1, 0), (0, 3), (3, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    used = used if name == "interleaved" else [link for link in used if set(link) != {0, 3}]
    for rank in range(4):
        assert links(rank) == [link for link in used if rank in link]


@pytest.mark.parametrize(
    "flags, mode",
    [
        ({}, "plain"),
        ({"no_overlap_p2p_communication": True}, "batched"),
        ({"use_ring_exchange_p2p": True}, "ring"),
        ({"use_ring_exchange_p2p": True, "no_overlap_p2p_communication": True}, "ring"),
    ],
)
def test_megatrons_flags_choose_the_mode(flags, mode):
    assert ParallelConfig(**flags).p2p_mode == P2PMode(mode)


@pytest.mark.parametrize("mode", P2PMode)
def test_an_end_of_the_pipeline_posts_nothing_on_a_gpu_either(mode):
    """Torch's batch_isend_irecv([]) is an IndexError; the branch for CPUs hid it."""
    assert Transport(Axis(0, 2, (0, 1), None, torch.device("cuda")), mode).post([]) == []
