"""Import an object by its path, so that a plug-in can be named in the run's TOML."""

from importlib import import_module
from typing import Any


def load_object(spec: str) -> Any:
    """The object that `spec`, written "my.module:name", points to.

    Raises ValueError when `spec` isn't of that form, the module can't be found (or what it
    imports), or it has no such name; what else the module raises is passed on.
    """
    module_name, separator, name = spec.partition(":")
    if not (module_name and separator and name):
        raise ValueError(f"{spec!r} is not of the form 'my.module:name'")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{spec!r}: importing {module_name!r} failed: {error}; it must be importable from where "
            "the run starts, with everything that it imports"
        ) from error
    if not hasattr(module, name):
        raise ValueError(f"{spec!r}: module {module_name!r} has no {name!r}")
    return getattr(module, name)
