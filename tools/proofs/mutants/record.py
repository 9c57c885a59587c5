"""A plugin of pytest: what a test costs in CPU seconds, and no cached result of an earlier test.

Seconds of a busy machine say little, and who finds a result in a cache does not run the lines that
made it.
"""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Iterator

import pytest


def cpu_seconds() -> float:
    """Return the processor seconds of this process and of the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def clear_caches() -> None:
    """Forget what functions of the package have kept."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megapipe."):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Put the seconds of a test into its report, where --junitxml finds them."""
    clear_caches()
    begun = cpu_seconds()
    try:
        yield
    finally:
        item.user_properties.append(("cpu_seconds", round(cpu_seconds() - begun, 3)))
