"""Two hosts that are network namespaces of one machine: real torchrun on both, one that dies, one that is unplugged."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from programs import ROOT
from safetensors import safe_open

SCRIPT = str(ROOT / "scripts" / "two_hosts.sh")
# Without the variable torch 2.13 gives a launcher that took another's place no address of the first rank.
RUN = (
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
    "torchrun --nnodes 2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint host0:29500 "
    "--rdzv-id run --rdzv-conf join_timeout=300 pretrain_gpt.py --num-layers 4 --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 127 --num-workers 0 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 8 --lr 3e-3 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --train-iters 60 --log-interval 1 "
    "--save-interval 10 --distributed-timeout-minutes 0.5 --save {0} --load {0}"
)

pytestmark = pytest.mark.skipif(
    "MEGAPIPE_NIGHTLY" not in os.environ or os.geteuid() != 0 or not Path("/usr/sbin/ip").exists(),
    reason="nightly, as root, with iproute2",
)


def saved_tensors(folder: Path) -> dict[str, str]:
    """Name -> digest; which file has it depends on which host is first."""
    digests = {}
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "np") as file:
            digests |= {name: hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest() for name in file.keys()}  # noqa: SIM118
    return digests


class Hosts:
    """The two, each with a log."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, {}
        subprocess.run(["bash", SCRIPT, "up"], check=True)

    def start(self, host: int, command: str) -> None:
        with open(self.folder / f"host{host}", "a") as log:
            arguments = ["bash", SCRIPT, "on", str(host), command]
            self.running[host] = subprocess.Popen(arguments, stdout=log, stderr=log, cwd=ROOT)

    def log(self, host: int) -> str:
        return (self.folder / f"host{host}").read_text()

    def wait_for(self, host: int, text: str, seconds: float = 300) -> float:
        """Seconds until a host's log has it."""
        start = time.monotonic()
        while not re.search(text, self.log(host)):
            assert time.monotonic() < start + seconds, f"no {text!r} in\n{self.log(host)[-6000:]}"
            time.sleep(0.2)
        return time.monotonic() - start

    def kill(self, host: int) -> None:
        self.running[host].send_signal(signal.SIGKILL)
        self.running[host].wait()

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        subprocess.run(["bash", SCRIPT, "down"], check=True)


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("unbroken")
    made = Hosts(folder)
    try:
        for host in range(2):
            made.start(host, RUN.format(folder / "saved"))
        assert [made.running[host].wait(300) for host in range(2)] == [0, 0], made.log(0)[-6000:]
    finally:
        made.close()
    return saved_tensors(folder / "saved" / "iter_0000060")


def test_a_host_that_dies_is_named_and_the_run_goes_on_when_it_returns(hosts, unbroken, tmp_path):
    command = RUN.format(tmp_path / "saved")
    for host in range(2):
        hosts.start(host, command)
    hosts.wait_for(1, r"iteration +1[2-9]/")
    hosts.kill(1)
    print(f"a dead host is named after {hosts.wait_for(0, 'ranks 2 and 3 do not answer'):.1f} s")
    time.sleep(20)  # torchrun takes a launcher for gone after 15 s; no machine is back earlier
    hosts.start(1, command)
    assert [hosts.running[host].wait(300) for host in range(2)] == [0, 0], hosts.log(0)[-6000:]
    assert saved_tensors(tmp_path / "saved" / "iter_0000060") == unbroken


def test_a_host_that_dies_comes_back_from_the_memory_of_the_other(hosts, unbroken, tmp_path):
    """No checkpoint is on disk before the last step."""
    memory = "--non-persistent-ckpt-type local --non-persistent-save-interval 1 --replication --replication-jump 2"
    command = RUN.format(tmp_path / "saved").replace("--save-interval 10", f"--save-interval 60 {memory}")
    for host in range(2):
        hosts.start(host, command)
    hosts.wait_for(1, r"iteration +1[2-9]/")
    hosts.kill(1)
    time.sleep(20)
    hosts.start(1, command)
    assert [hosts.running[host].wait(300) for host in range(2)] == [0, 0], hosts.log(0)[-6000:]
    # One step is lost at most, and no step before it runs a second time.
    steps = [int(n) for log in map(hosts.log, range(2)) for n in re.findall(r"iteration +(\d+)/", log)]
    assert max(map(steps.count, range(1, 12))) == 1
    assert saved_tensors(tmp_path / "saved" / "iter_0000060") == unbroken


def test_a_host_without_its_cable_is_named_and_the_run_goes_on_when_it_is_back(hosts, unbroken, tmp_path):
    command = RUN.format(tmp_path / "saved")
    for host in range(2):
        hosts.start(host, command)
    hosts.wait_for(1, r"iteration +1[2-9]/")
    subprocess.run(["bash", SCRIPT, "unplug"], check=True)
    print(f"an unplugged host is named after {hosts.wait_for(0, 'ranks 2 and 3 do not answer'):.1f} s")
    subprocess.run(["bash", SCRIPT, "plug"], check=True)
    assert [hosts.running[host].wait(300) for host in range(2)] == [0, 0], hosts.log(0)[-6000:]
    assert saved_tensors(tmp_path / "saved" / "iter_0000060") == unbroken
