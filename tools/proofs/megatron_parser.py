"""Print the arguments that Megatron-LM's own parser accepts, as JSON: names, arities, defaults and
choices, no help.

    MEGATRON=<checkout> python -m tools.proofs.megatron_parser > tests/flags/megatron_parser.json

The test beside that file holds our flags against it. Megatron-LM's arguments import its models, and
those Triton, which has no package for CPUs: a stand-in takes its place.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
import types
import typing
import warnings
from enum import Enum
from typing import Any

MEGATRON = "MEGATRON"


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports of Triton: whatever is asked of it is a decorator that changes nothing."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        mine = name.partition(".")[0] == "triton"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module: Any = types.ModuleType(spec.name)
        module.__version__ = "0.0.0"
        module.__getattr__ = _attribute
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **_: args[0] if args and callable(args[0]) else lambda given: given


def parser_of(checkout: str) -> argparse.ArgumentParser:
    """Megatron-LM's parser, from a checkout of it."""
    # Before the stand-in, which torch would take for Triton.
    import torch._functorch.aot_autograd  # noqa: F401

    sys.path.insert(0, checkout)
    sys.meta_path.insert(0, StandIn())
    vars(typing).setdefault("override", lambda method: method)  # Python 3.11 has none
    warnings.simplefilter("ignore")
    from megatron.training.arguments import add_megatron_arguments  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser(allow_abbrev=False)
    return add_megatron_arguments(parser)  # type: ignore[no-any-return]


def facts(action: argparse.Action) -> dict[str, Any]:
    """Return the facts of one argument that are not None. values: how many it takes, 0, 1 or
    "many".
    """
    found = {
        "names": action.option_strings,
        "values": 0 if action.nargs == 0 else 1 if action.nargs in (None, "?") else "many",
        "default": _plain(action.default),
        "choices": [_plain(choice) for choice in action.choices] if action.choices else None,
        "type": action.type.__name__ if isinstance(action.type, type) else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    return value if isinstance(value, (int, float, str, list, type(None))) else str(value)


def main() -> None:
    checkout = os.environ[MEGATRON]
    commit = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "--short=8", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    rows = [
        facts(action)
        for action in parser_of(checkout)._actions
        if "--help" not in action.option_strings
    ]
    lines = ",\n".join(json.dumps(row) for row in sorted(rows, key=lambda row: row["names"]))
    print(f'{{"commit": "{commit}", "arguments": [\n{lines}\n]}}')


if __name__ == "__main__":
    main()
