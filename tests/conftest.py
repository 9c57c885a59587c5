"""Tests of half a minute begin first, so that no worker ends long after the others."""

LONG = ("test_scripts.py", "test_hangs.py", "test_compile.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)
