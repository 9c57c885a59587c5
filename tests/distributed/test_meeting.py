"""Ranks that do not come are named by those that did; what the backend says is told whole."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from programs import run_ranks
from torch.distributed import PrefixStore, TCPStore

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import CPU
from megapipe.distributed.meeting.meeting import _listens, call_the_roll
from megapipe.distributed.meeting.met import Met
from megapipe.distributed.mesh import ProcessMesh
from megapipe.errors import ConfigError, ScheduleError


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def roll(ranks: list[int], world_size: int, timeout_s: float) -> set[str]:
    """What the ranks that come are told."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)

    def one(rank: int) -> str:
        client = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=20))
        return call_the_roll(PrefixStore("roll", client), rank, world_size, timeout_s)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return set(pool.map(one, ranks))


def test_all_ranks_go_on_when_all_have_come():
    assert roll([0, 1, 2, 3], 4, 20) == {""}


def test_all_ranks_that_came_name_those_that_did_not():
    host = socket.gethostname()
    assert roll([0, 1, 2, 5, 7], 10, 0.3) == {
        f"ranks 3..4, 6, 8..9 of 10 did not come (here: ranks 0..2, 5, 7 on {host})"
    }


@pytest.mark.parametrize(
    "rank, said",
    [
        (0, "rank 1 of 2 did not come (here: rank 0 on {host}), within {limit}, to {address}\n"),
        (1, "rank 1 on {host} did not reach the other ranks at {address} ({limit}): "),
    ],
)
def test_a_rank_alone_says_so_after_the_timeout(monkeypatch, rank, said):
    port = free_port()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError) as caught:
        ProcessMesh.create(ParallelConfig(distributed_timeout_minutes=0.005), CPU)
    limit = "--distributed-timeout-minutes 0.005"
    assert str(caught.value).startswith(
        said.format(host=socket.gethostname(), limit=limit, address=f"127.0.0.1:{port}")
    )
    assert "Start every rank of 0..1 with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE" in str(caught.value)


def test_a_rank_whose_launcher_was_killed_while_it_imported_ends_at_once(monkeypatch):
    """It waited ten minutes for the launcher's store."""
    port = free_port()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": 1}
    for name, value in (address | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError) as caught:
        ProcessMesh.create(ParallelConfig(), CPU)
    host = socket.gethostname()
    assert str(caught.value) == f"rank 1 on {host}: its launcher, which keeps 127.0.0.1:{port}, has ended"


def test_what_nccl_says_is_told_to_its_last_line(monkeypatch):
    """The line that says why was cut off, and the advice was to wait longer."""
    text = "NCCL error in: NCCLUtils.cpp:94, invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0"

    def refuse(*args, **kwargs):
        raise dist.DistBackendError(text)

    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.setattr("megapipe.distributed.meeting.met.meet", lambda *args: dist.HashStore())
    monkeypatch.setattr("megapipe.distributed.meeting.met.agree", lambda *args: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError) as caught:
        ProcessMesh.create(ParallelConfig(), CPU)
    assert str(caught.value) == (
        f"rank 1 on {socket.gethostname()} could not make its process groups (gloo, cpu):\n{text}"
    )


def test_processes_that_make_a_second_mesh_meet_again():
    """It read the addresses of the first one's peers: "Connection refused" on one rank, a RuntimeError on the other."""
    said = run_ranks(2, [Path(__file__).parent / "three_meshes.py"])
    assert sorted(line for line in said.splitlines() if "stages" in line) == [
        *["1 stages, sum 2"] * 4,
        *["2 stages, sum 2"] * 2,
    ]


@pytest.mark.parametrize("world", ["own", "guest"])
def test_a_mesh_is_there_when_every_rank_has_made_its_groups(world, tmp_path):
    """A rank that closed its mesh at once cut off a slower one: "Gloo connectFullMesh failed"."""
    program = Path(__file__).parent / "late_groups.py"
    said = run_ranks(2, [program, tmp_path / "made", world])
    assert said.splitlines().count("all groups are made: True") == 2


def test_a_store_that_opens_while_it_is_asked_is_heard(monkeypatch):
    port, opened = free_port(), list[socket.socket]()

    def sleep(seconds: float) -> None:
        opened.append(socket.create_server(("127.0.0.1", port)))

    monkeypatch.setattr("time.sleep", sleep)
    assert _listens("127.0.0.1", port)
    opened.pop().close()
    assert not opened


def test_nobody_listens_after_three_refusals(monkeypatch):
    slept = list[float]()
    monkeypatch.setattr("time.sleep", slept.append)
    assert not _listens("127.0.0.1", free_port())
    assert len(slept) == 3


def in_threads(ranks: int, body: Callable[[Met], object]) -> list[object]:
    """Return what `body` returns or raises on each rank of a world with one store."""
    store = PrefixStore("test", dist.HashStore())

    def answer(rank: int) -> object:
        try:
            return body(Met(rank, ranks, False, store))
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(answer, range(ranks)))


def test_rank_0_alone_makes_what_all_ranks_get():
    made = []

    def body(met: Met) -> object:
        return met.from_first("numbers", lambda: made.append(met.rank) or (1, "two", {3: 4.0}))

    assert in_threads(3, body) == [(1, "two", {3: 4.0})] * 3
    assert made == [0]


def test_an_error_of_rank_0_is_every_ranks_error():
    def refuses() -> None:
        raise ScheduleError(["no room", "no time"])

    answers = in_threads(3, lambda met: met.from_first("table", refuses))
    assert [type(answer) for answer in answers] == [ScheduleError, ConfigError, ConfigError]
    assert {str(answer) for answer in answers} == {"2 problems\n  no room\n  no time"}


def test_a_defect_on_rank_0_holds_nobody_up():
    first, second = in_threads(2, lambda met: met.from_first("table", lambda: 1 / 0))
    assert isinstance(first, ZeroDivisionError)
    assert str(second) == "on rank 0: ZeroDivisionError('division by zero')"
