"""Cases that a test draws by day, and all of them in scripts/nightly.sh."""

import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")
NIGHTLY = bool(os.environ.get("MEGAPIPE_NIGHTLY"))


def by_night(cases: Iterable[Case], *, day: Iterable[Case]) -> list[Case]:
    """Return all cases if the nightly command runs the tests, and those of `day` otherwise.

    Those of `day` have each kind of case at least once: a defect that the others find, one of them finds.
    """
    return list(cases if NIGHTLY else day)
