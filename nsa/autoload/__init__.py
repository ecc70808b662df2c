"""Registration with transformers, so that a saved model opens without `import nsa.hf`.

torch calls `install` at the end of its import by this package's entry point "torch.backends";
TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off. Nothing of transformers is imported here: once its
table of model types is imported, a line is added, and `nsa.hf` is imported when that is looked up.

It is installed as `nsa_autoload`, since a program may have its own module `nsa`, and
`import torch` fails if an entry point fails.
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
    """Module in place of transformers.models.nsa, with the names of `nsa.hf`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module("nsa.hf"), name)


class _Then(Loader):
    """Loader of the table that calls the original loader and adds a line."""

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
    """Add the model type "nsa" to transformers' table, now or when that is imported. Never raises,
    since that would make the import of torch fail."""
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
