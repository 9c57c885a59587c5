"""Import what a user names on the command line: a function or class of their own.

The name is MODULE:NAME or FILE.py:NAME.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from megapipe.errors import ConfigError, UserError


def find_named(name: str, flag: str, example: str) -> Any:
    """Return the function or class that MODULE:NAME or FILE.py:NAME names.

    Args:
        name: the name as typed.
        flag: the flag whose value is `name`, for the remedy.
        example: a name of this kind, such as my_model:provider.
    Raises: ConfigError if there is no such module, file or function. The text begins with the name.
    """
    # From the right: a path may contain a colon.
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        module, _, thing = example.partition(":")
        raise ConfigError(
            f"{name} is not MODULE:NAME, such as {example} or path/{module}.py:{thing}"
        )
    module_of = _import(where, name, flag)
    found = getattr(module_of, attribute, None)
    if not callable(found):
        others = [n for n, value in vars(module_of).items() if callable(value)]
        near = difflib.get_close_matches(attribute, others, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{name}: {where} has no function {attribute}{hint}")
    return found


def place_of(error: BaseException) -> str:
    """Return a text with an error of the user's code, its file and its line.

    For example `NameError: name 'x' is not defined (mine.py, line 12)`.
    """
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"


def _import(where: str, name: str, flag: str) -> ModuleType:
    """Return the imported module.

    Args:
        where: a module's name, or the path of a .py file, which is run as a module.
        name: the full value of the flag, MODULE:NAME or FILE.py:NAME, for the error.
        flag: the flag, for the error.
    Raises: ConfigError if there is no such module or file, or if importing it fails.
    """
    try:
        if where.endswith(".py"):
            return _load_file(Path(where))
        # Python searches the script's folder, and the user names modules of the current one. At the
        # end, so that nothing there takes the place of an installed module.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        return importlib.import_module(where)
    except UserError:
        # The user's module may raise one of ours, which has its remedy already.
        raise
    except (ImportError, SyntaxError, OSError) as error:
        file = f"{where.replace('.', '/')}.py:{name.rpartition(':')[2]}"
        remedy = ""
        if not where.endswith(".py"):
            remedy = f". The file can be named too: {flag} path/to/{file}"
        raise ConfigError(f"{name}: cannot import {where}: {error}{remedy}") from None
    except Exception as error:
        # Whatever the user's own module raises.
        raise ConfigError(f"{name}: cannot import {where}: {place_of(error)}") from error


def _load_file(path: Path) -> ModuleType:
    # Not the stem itself: a file json.py must not take the place of the module json.
    name = f"named_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before the module runs: a dataclass looks its module up there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
