"""Modules of the backends by name, without an import of torch."""

import sys

from nsa.spelling import nearest

# In order of preference of `auto` for shapes that were not measured.
MODULES = {
    name: f"nsa.attention.backends.{name}"
    for name in ("triton", "flash", "flex", "packed", "gather", "sdpa", "masked")
}


def check(name: str) -> None:
    """Raise ValueError for a name that begins with no backend's, and is not "auto"."""
    if name.partition(":")[0] not in ("auto", *MODULES):
        raise ValueError(f"backend {name!r} is unknown; {nearest(name, ['auto', *MODULES])}")


def add(name: str, module: str) -> None:
    """Make a backend of another package known, last in the order of preference of `auto`.

    `module` has a `BACKEND`, and may have `VARIANTS`, of `nsa.attention.registry.Backend`. It is
    imported with the other backends; a name that is known already gets the new module.
    """
    MODULES[name] = module
    if registry := sys.modules.get("nsa.attention.registry"):
        registry.load(name)  # now, because torch.compile cannot trace an import
