"""Which device a rank takes, on machines that are not here."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import programs
import pytest
import torch
import torch.distributed as dist

from megapipe.config import ParallelConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.device import has_cuda, pick_device, same_stream
from megapipe.distributed.groups import group_of
from megapipe.errors import ConfigError
from megapipe.pipeline_parallel.messages.transport import Transport


@pytest.fixture
def machine(monkeypatch):
    """A machine of so many GPUs that starts so many ranks; this is the last of them."""

    def made(gpus: int, ranks: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_RANK", str(ranks - 1))
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")

    return made


@pytest.mark.parametrize(
    "gpus, ranks, device",
    [(8, 8, "cuda:7"), (8, 2, "cuda:1"), (1, 1, "cuda:0"), (1, 8, "cuda:0"), (0, 2, "cpu")],
)
def test_a_rank_takes_its_own_gpu_also_the_only_one_that_its_task_sees(machine, gpus, ranks, device):
    """8 tasks bound to a GPU each (srun --gpus-per-task 1) trained on the CPU."""
    machine(gpus, ranks)
    assert has_cuda() == (gpus > 0)
    assert str(pick_device(ParallelConfig())) == device
    assert pick_device(ParallelConfig(distributed_backend="gloo")).type == "cpu"


def test_a_machine_with_gpus_does_not_train_on_its_cpu_unasked(machine):
    machine(4, 8)
    assert not has_cuda()
    with pytest.raises(ConfigError) as error:
        pick_device(ParallelConfig())
    assert error.value.problems == (
        "--nproc-per-node 8, on a machine of 4 GPUs: start at most 4 ranks there (torchrun --nproc-per-node 4), "
        "or compute on the CPU with --distributed-backend gloo.",
    )
    assert pick_device(ParallelConfig(distributed_backend="gloo")).type == "cpu"


def test_no_message_is_received_ahead_of_its_turn_where_the_host_waits_for_kernels(monkeypatch):
    """Every plain pipeline hung at its first step under CUDA_LAUNCH_BLOCKING=1."""
    pp = Axis(0, 2, (0, 1), device=torch.device("cuda"), links=(object(), object()))
    for said, places in (("0", 1), ("1", 0)):
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", said)
        assert Transport(pp).receives_ahead.places == places


def test_links_have_few_blocks_and_no_other_communicator_does(monkeypatch):
    """A receive that waits took up to 32 of an H100's 132 multiprocessors from the passes beside it."""
    asked = []
    options = SimpleNamespace(config=SimpleNamespace(max_ctas=32))
    world = SimpleNamespace(
        bound_device_id=torch.device("cuda", 0), _get_backend=lambda device: SimpleNamespace(options=options)
    )
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)
    monkeypatch.setattr(dist, "split_group", lambda **given: asked.append(given["pg_options"].config.max_ctas))
    for is_link in (True, False):
        group_of([(0, 1)], 0, torch.device("cuda"), timedelta(seconds=1), is_link=is_link)
    assert asked == [2, 32]


def test_another_thread_stays_on_the_ranks_device(monkeypatch):
    """A thread begins with device 0: leaving a stream went back there, and made a context of each rank on it."""
    visited: list[int] = []
    current = [0]

    class Stream:
        def __enter__(self):
            self.before = current[0]
            current[0] = 3
            visited.append(3)

        def __exit__(self, *_):
            current[0] = self.before
            visited.append(self.before)

    def take(device):
        current[0] = device.index
        visited.append(device.index)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Stream())
    monkeypatch.setattr(torch.cuda, "set_device", take)
    entered = same_stream(torch.device("cuda", 3))
    for _ in range(2):
        with entered():
            pass
    assert set(visited) == {3}


def test_deterministic_mode_refuses_a_kernel_that_does_not_repeat(tmp_path):
    """As with --deterministic-mode."""
    (tmp_path / "main.py").write_text(
        "import torch; from megapipe.distributed.device import be_deterministic; be_deterministic();"
        "torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))"
    )
    done = programs.run([tmp_path / "main.py"])
    assert "does not have a deterministic implementation" in done.stderr
