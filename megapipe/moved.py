"""Import public modules and names by the names that they had one version ago, with a warning.

`CHANGELOG.md` lists each with its new place. A line goes one version after it has come.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "config.fp8": "config.model.fp8",
    "config.mla": "config.model.mla",
    "config.moe": "config.model.moe",
    "config.mtp": "config.model.mtp",
    "flags.different": "flags.differences",
    "flags.holds": "flags.noop_flags",
    "flags.known": "flags.megatron_flags",
    "pipeline_parallel.slices": "pipeline_parallel.shapes.slices",
    "plan.slices": "plan.shapes.slices",
    "training.report.flops": "plan.seconds.flops",
    "schedule.own": "schedule.generators.own",
    "schedule.transforms": "schedule.shapes",
    "schedule.transforms.depths": "schedule.shapes.depths",
    "schedule.transforms.memory": "schedule.families.offload.copies",
    "schedule.transforms.merge": "schedule.core.merge",
    "schedule.transforms.optimizer": "schedule.families.step.optimizer",
    "schedule.transforms.pairs": "schedule.shapes.pairs.pairs",
    "schedule.transforms.reduction": "schedule.families.step.reduction",
    "schedule.transforms.slices": "schedule.shapes.slices.slices",
    "schedule.transforms.vocabulary": "schedule.families.vocabulary.shares",
    "schedule.memory.solve": "schedule.families.offload.solve",
    "schedule.weights": "schedule.families.sharding",
    "schedule.weights.sharded": "schedule.families.sharding.sharded",
    "training.seams": "training.hooks",
}
"""The new place of each module of megapipe 0.1 that users import."""
# A class that changed its name is found by the former one too.
_RENAMED = {"training.seams": {"Seams": "Hooks"}}
"""Names that changed when their module moved."""


def moved_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose names have moved or changed.

    Args:
        module: the `__name__` of the module.
        names: {former name: MODULE:NAME below megapipe}, such as
            {"Point": "schedule.views.study:Comparison"}.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        room, _, new = names[name].partition(":")
        _warn(f"{module}.{name}", f"megapipe.{room}.{new}")
        return getattr(import_module(f"megapipe.{room}"), new)

    return find


class Moved:
    """A finder and loader of former modules, for `sys.meta_path`.

    A former module has the names of the module that replaces it, and none of its own.

    Python calls `find_spec`, `create_module` and `exec_module` when it imports a module.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a former module, None for any other name.

        Args:
            name: the full name of the module to import.
            path, target: unused arguments of Python's interface.
        """
        if name.removeprefix("megapipe.") not in MODULES:
            return None
        # A package, because a former module may lie in a former package.
        return ModuleSpec(name, Moved, is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Return None, so that Python makes the module itself."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Give the former module a `__getattr__` that looks names up in the new module."""
        # Imported here and not by `find_spec`, which only asks whether there is such a module.
        room = module.__name__.removeprefix("megapipe.")
        new = import_module(f"megapipe.{MODULES[room]}")
        _warn(module.__name__, new.__name__)
        renamed = _RENAMED.get(room, {})

        def find(name: str) -> Any:
            return getattr(new, renamed.get(name, name))

        vars(module)["__getattr__"] = find


def install() -> None:
    """Let former modules be imported. A module that exists takes precedence."""
    # Last, so that a module which exists costs nothing more.
    if Moved not in sys.meta_path:
        sys.meta_path.append(Moved)


def _warn(former: str, new: str) -> None:
    # Python shows a FutureWarning in modules of users too, a DeprecationWarning in scripts alone.
    warnings.warn(
        f"{former} is {new} now; the former name goes with the next version",
        FutureWarning,
        stacklevel=3,
    )
