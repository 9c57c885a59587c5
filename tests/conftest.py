"""Tests that wait for processes and timeouts come first, all for one worker: the others use the cores meanwhile."""

import gc
import os

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # 0.2 s an example is what a busy one misses
settings.load_profile("any machine")

WAITING = (
    "gpu_check",
    "scripts",
    "hangs",
    "chaos",
    "background",
    "launch",
    "layout_launch",
    "bench",
    "plan_tool",
    "meeting",
    "lock",
)


def pytest_configure():
    """Each worker but the first, which waits most, keeps to its share of the cores. Ranks that are threads of a process
    or talk through sockets wake each other for a quarter less work where they share a core."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if worker != "gw0" and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[int(worker[2:]) - 1 :: workers - 1] or cores)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in WAITING)


def pytest_collection_finish():
    """What is imported stays: half a million objects that Python would look through again and again for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Return gloo processes that a test file shares."""
    from rank_pool import Pool  # imports torch, which few files need

    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def one_thread():
    """Compute with one thread, as ranks that are processes do: sums of other lengths would have other bits."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
