"""Flags of a check before the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckConfig:
    """What --check looks at."""

    check: bool = False
    """Check everything, print the plan and what becomes of each flag, and stop: one process, no GPU, status 0 or 2."""
    check_paths: Literal["yes", "no"] = "yes"
    """no: files and folders that --check misses are listed, and the check goes on without them."""
    world_size: int | None = None
    """Number of processes that --check assumes. Default: WORLD_SIZE in the environment, else 1."""
