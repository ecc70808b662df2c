"""Parameter names of earlier versions, for checkpoints and state dicts that have them."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

_SINCE = [
    (re.compile(rf"(^|\.){old}(?=\.|$)"), rf"\1{new}")
    for old, new in (
        (r"([kv]_proj)\.shared", r"\2"),
        (r"([kv]_proj)\.(cmp|slc|win)", r"\3.\2"),
        ("out_proj", "o_proj"),
        (r"mlp\.(gate|up|down)", r"mlp.\2_proj"),
        (r"(?<!\w)embed", "embed_tokens"),
    )
]


def today(name: str) -> str:
    """A parameter's or module's name in this version: attention.k_proj.cmp.weight, say, is
    attention.cmp.k_proj.weight."""
    for pattern, new in _SINCE:
        name = pattern.sub(new, name)
    return name


def renamed(named: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under the names of this version."""
    return {today(name): value for name, value in named.items()}


def rename_on_load(module: nn.Module, named: dict[str, Any], prefix: str, *_: Any) -> None:
    """Renames a module's part of a state dict in place: a hook for
    `torch.nn.Module.register_load_state_dict_pre_hook`."""
    for name in [name for name in named if name.startswith(prefix)]:
        new = prefix + today(name[len(prefix) :])
        if new != name and new not in named:
            named[new] = named.pop(name)
