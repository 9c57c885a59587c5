"""Things that a user names on the command line: MODULE:NAME or FILE.py:NAME, a function or class of their own."""

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
    """The thing that MODULE:NAME or FILE.py:NAME names, something that can be called.

    Args:
        flag: in whose value the name stands, for the remedy.
        example: a name of this kind, such as my_model:provider.
    Raises: ConfigError, its text beginning with the name, if there is no such module, file or function.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        module, _, thing = example.partition(":")
        raise ConfigError(f"{name} is not MODULE:NAME, such as {example} or path/{module}.py:{thing}")
    module_of = _import(where, name, flag)
    found = getattr(module_of, attribute, None)
    if not callable(found):
        near = difflib.get_close_matches(attribute, [n for n, v in vars(module_of).items() if callable(v)], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{name}: {where} has no function {attribute}{hint}")
    return found


def place_of(error: BaseException) -> str:
    """`NameError: name 'x' is not defined (mine.py, line 12)`: an error of the user's code and where it rose."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"


def _import(where: str, name: str, flag: str) -> ModuleType:
    try:
        if where.endswith(".py"):
            return _load_file(Path(where))
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # where the user is, not only where the script lies
        return importlib.import_module(where)
    except UserError:
        raise
    except (ImportError, SyntaxError, OSError) as error:
        file = f"{where.replace('.', '/')}.py:{name.rpartition(':')[2]}"
        remedy = "" if where.endswith(".py") else f". The file can be named too: {flag} path/to/{file}"
        raise ConfigError(f"{name}: cannot import {where}: {error}{remedy}") from None
    except Exception as error:  # whatever the user's own module raises
        raise ConfigError(f"{name}: cannot import {where}: {place_of(error)}") from error


def _load_file(path: Path) -> ModuleType:
    name = f"named_{path.stem}"  # not the stem: a file json.py must not take the place of json
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
