"""Parameter names of earlier versions, for old checkpoints and state dicts."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from nsa.reference.nsa import BRANCHES

# Parts of names in earlier versions, and their present names.
SINCE = {
    "out_proj": "o_proj",
    "embed": "embed_tokens",
    **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    **{f"{kind}_proj.shared": f"{kind}_proj" for kind in "kv"},
    **{f"{kind}_proj.{b}": f"{b}.{kind}_proj" for kind in "kv" for b in BRANCHES},
}


def today(name: str) -> str:
    """Name of a parameter or module in this version: for example, attention.k_proj.cmp.weight is
    attention.cmp.k_proj.weight."""
    for old, new in SINCE.items():
        name = re.sub(rf"(?<![^.]){re.escape(old)}(?![^.])", new, name)
    return name


def renamed(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values under the names of this version."""
    return {today(name): value for name, value in named.items()}


def rename_on_load(module: nn.Module, named: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename a module's part of a state dict in place: a hook for
    `torch.nn.Module.register_load_state_dict_pre_hook`."""
    for name in [name for name in named if name.startswith(prefix)]:
        new = prefix + today(name[len(prefix) :])
        if new != name and new not in named:
            named[new] = named.pop(name)
