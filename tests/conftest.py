"""Tests that wait for processes and timeouts come first, all for one worker: the others use the cores meanwhile."""

import gc
import os
import weakref
from pathlib import Path

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


def pytest_configure(config):
    """Each worker but the first, which waits most, keeps to its share of the cores. Ranks that are threads of a process
    or talk through sockets wake each other for a quarter less work where they share a core."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if worker != "gw0" and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[int(worker[2:]) - 1 :: workers - 1] or cores)
    config.pluginmanager.register(Frozen())


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in WAITING)


class Frozen:
    """What is imported stays: half a million objects that Python would look through again and again for garbage.

    A test that trains in this process may undo that: then each collection of all later tests took 0.2 s. Or it freezes
    its own groups, too, though they are garbage. Three threads of each wake 100 times a second: 240 groups took half
    a core from all later tests.
    """

    def pytest_collection_finish(self):
        self.freeze_anew()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self):
        if threads() > self.threads + 60:
            self.freeze_anew()
        elif self.witness() is None:
            self.freeze()

    def freeze_anew(self):
        gc.unfreeze()
        gc.collect()
        self.threads = threads()
        self.freeze()

    def freeze(self):
        # Nobody knows this object but itself: it ends with the first collection of what is frozen now.
        witness = Frozen()
        witness.own = witness
        self.witness = weakref.ref(witness)
        gc.freeze()


def threads():
    """The threads of this process; those of C++, too, where the system tells of them."""
    tasks = Path("/proc/self/task")
    return len(os.listdir(tasks)) if tasks.is_dir() else 0


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
