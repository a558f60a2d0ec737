"""The function that package.module:factory or path/file.py:factory names."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from meshfold.errors import OptionError
from meshfold.models.user_code import user_code


def find_factory(argument: str) -> Callable[..., Any]:
    """The function, of a module that is imported with the working directory importable. Raises
    OptionError, whatever is wrong with the argument or the module."""
    module_name, colon, name = argument.partition(":")
    if not colon or not module_name or not name:
        raise OptionError(
            f"MODEL {argument!r}: no model; write package.module:factory or a path of a .json file"
        )
    with user_code(f"{argument}: importing it", remedy="correct the module"):
        _make_importable(os.getcwd())
        if module_name.endswith(".py"):
            module = _of_file(argument, Path(module_name).resolve())
        else:
            module = _of_name(argument, module_name)
        factory = getattr(module, name, None)
        if not callable(factory):
            raise OptionError(
                f"{argument}: module {module_name!r} has no function {name!r}; name one"
            )
        return factory  # type: ignore[no-any-return]


def _of_name(argument: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.split(".")[0] == error.name.split(".")[0]:
            raise OptionError(
                f"{argument}: no module {error.name!r} here or installed; write "
                "package.module:factory or path/file.py:factory"
            ) from error
        raise


def _of_file(argument: str, path: Path) -> ModuleType:
    """The module of a file, whose folder is importable then, as that of a script is."""
    if not path.is_file():
        raise OptionError(f"{argument}: no file {str(path)!r}; correct the path")
    loaded = sys.modules.get(path.stem)
    if loaded is not None:
        if _is_of(loaded, path):
            return loaded
        raise OptionError(
            f"{argument}: there is another module {path.stem!r}, which is in use; rename the file"
        )
    _make_importable(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _is_of(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path


def _make_importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
