"""Registration with transformers, so that a saved model opens without `import nsa.hf`.

torch calls `install` at the end of its own import: the entry point "torch.backends" of this package
says so, and TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off. Nothing of transformers is imported here:
once its table of model types is, it gets a line, and `nsa.hf` is imported when that is looked up.

It is installed as `nsa_autoload`, for a program may have a module `nsa` of its own, and
`import torch` fails where an entry point does.
"""

import sys
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

TABLE = "transformers.models.auto.auto_mappings"


class _Models(ModuleType):
    """Stands for transformers.models.nsa: its names are those of `nsa.hf`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module("nsa.hf"), name)


class _Then(Loader):
    """Loads the table as its own loader does, and adds a line."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        _add(module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


def install() -> None:
    """Adds the model type "nsa" to transformers' table, now or when that is imported. Raises
    nothing: torch would refuse to be imported."""
    if TABLE in sys.modules:
        _add(sys.modules[TABLE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _add(table: ModuleType) -> None:
    with suppress(Exception):  # a version of transformers that keeps its table otherwise
        if not Path(find_spec("nsa").origin).with_name("hf").is_dir():
            return  # somebody else's `nsa`
        table.CONFIG_MAPPING_NAMES.setdefault("nsa", "NSAConfig")
        sys.modules.setdefault("transformers.models.nsa", _Models("transformers.models.nsa"))
