"""Tests that wait for processes and timeouts come first, all for one worker: the others use the cores meanwhile."""

import gc

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


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in WAITING)


def pytest_collection_finish():
    """What is imported stays: half a million objects that Python would look through again and again for garbage."""
    gc.collect()
    gc.freeze()
