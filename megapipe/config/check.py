"""Flags of a check before the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megapipe.config.notes import LISTED, needs

_LAUNCHED = needs("check", "the launch tells")


@dataclass(frozen=True)
class CheckConfig:
    """Settings of --check."""

    check: bool = False
    """Check everything, print the plan and what becomes of each flag, and stop: one process, no GPU, status 0 or 2."""
    check_paths: Annotated[Literal["yes", "no"], _LAUNCHED] = "yes"
    """no: files and folders that --check misses are listed, and the check goes on without them."""
    world_size: Annotated[int | None, LISTED, _LAUNCHED] = None
    """Number of processes that --check assumes. Default: WORLD_SIZE in the environment, else 1."""
