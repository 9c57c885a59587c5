"""Tests of half a minute begin first, so that no worker ends long after the others."""

import gc

LONG = ("test_scripts.py", "test_hangs.py", "test_compile.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish():
    """What is imported stays: half a million objects that Python would look through again and again for garbage."""
    gc.collect()
    gc.freeze()
