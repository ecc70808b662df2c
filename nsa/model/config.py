"""Configuration of a model: all settings of its computation, frozen and stored with a run."""

import operator
import re
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from math import isfinite
from typing import Any

from nsa.config import BRANCHES, GATE_KINDS, PHI_KINDS, NSAConfig, as_int, other_than
from nsa.spelling import choice, nearest

SINK_KINDS = ("none", "learned")


@dataclass(frozen=True)
class ModelConfig:
    """A small Llama with NSA attention, or dense attention as its baseline.

    Dense attention reads the sizes, rotary, `backend` and `strict`; it ignores the options of NSA
    (`nsa`, `phi`, `gate` and its options, `compress_rope`, `shared_kv`, `sinks`). The backend's
    name is checked when a layer is built, because only the registry has the names.

    With share_selection k > 1 a layer between two that select attends to the blocks that the last
    of them chose, KV head by KV head, and neither scores blocks nor ranks them; its compressed and
    window branches and its own keys and values of the selected one stay.

    phi "mlp" has a GELU between its two matrices; the paper specifies no nonlinearity.

    Raises:
        TypeError: a size that is not an int, a flag that is not a bool, a name that is not a str.
        ValueError: values that are unknown or do not fit; the message suggests valid ones.
    """

    name: str
    layers: int
    dim: int
    heads: int  # HQ
    kv_heads: int  # HKV
    head_dim: int  # D
    value_dim: int | None = None  # DV; None: head_dim
    vocab: int = 256
    mlp_hidden: int | None = None  # None: see `mlp_size`
    attention: str = "nsa"  # or "dense": causal over all tokens, one K/V projection
    nsa: NSAConfig = field(default_factory=NSAConfig)
    phi: str = "mean"  # or "linear", or "mlp"
    gate: str = "sigmoid"  # or "linear", "softmax", or "uniform": 1/3 each, without parameters
    gate_temperature: float = 1.0  # the gate's logits are divided by it
    gate_init: str = "xavier"  # the gate's last matrix: gain 0.1, or "zero"
    compress_rope: str = "before"  # rotate keys before phi, or compressed keys after it
    shared_kv: bool = False  # one K/V projection for all three branches
    share_selection: int = 1  # layers 0, k, 2k, ... select blocks; those between reuse the last
    force_branch: str | None = None  # this branch alone, with gate 1
    stopgrad_gates: bool = False
    sinks: str = "none"  # or "learned": a logit without a value a head and branch, from 0 on
    backend: str = "auto"
    strict: bool = False  # raise on the first non-finite value
    checkpoint: str = ""  # layers to recompute in the backward: "", "all" or "start:end"
    rope_base: float = 10000.0
    rope_scale: float = 1.0  # positions are divided by it: position interpolation
    norm_eps: float = 1e-6
    max_tokens: int | None = None  # longer inputs are refused; None: any length

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r} is not a str")
        for name in ("layers", "dim", "heads", "kv_heads", "head_dim", "vocab", "share_selection"):
            keep_int(self, name)
        for name in ("value_dim", "mlp_hidden", "max_tokens"):
            if getattr(self, name) is not None:
                keep_int(self, name)
        for name in ("shared_kv", "stopgrad_gates", "strict"):
            check_bool(name, getattr(self, name))
        if not isinstance(self.nsa, NSAConfig):
            must = other_than("NSAConfig", self.nsa)
            raise TypeError(f"nsa={self.nsa!r} is not a config of sizes: {must}")
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; "
                f"kv_heads may be {', '.join(map(str, divisors))}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd and rotary turns pairs; nearest that do: "
                f"{self.head_dim - 1 or 2} and {self.head_dim + 1}"
            )
        choice("attention", self.attention, ("nsa", "dense"))
        choice("phi", self.phi, PHI_KINDS)
        choice("gate", self.gate, GATE_KINDS)
        choice("gate_init", self.gate_init, ("xavier", "zero"))
        choice("sinks", self.sinks, SINK_KINDS)
        choice("compress_rope", self.compress_rope, ("before", "after"))
        forced = f"force_branch={self.force_branch!r}"
        if self.force_branch not in (*BRANCHES, None):
            raise ValueError(f"{forced} is unknown; known are {', '.join(BRANCHES)}, None")
        if self.force_branch and self.attention == "dense":
            raise ValueError(
                f"{forced}: dense attention has no branches; force_branch=None would do, or "
                "attention='nsa'"
            )
        if self.share_selection > 1 and (
            self.attention == "dense" or self.force_branch in ("cmp", "win")
        ):
            given = "attention='dense'" if self.attention == "dense" else forced
            raise ValueError(
                f"share_selection={self.share_selection}: with {given} no layer selects blocks; "
                "share_selection=1 would do"
            )
        if not isinstance(self.backend, str) or not self.backend:
            raise ValueError(f"backend={self.backend!r} is no backend's name; 'auto' chooses one")
        for name in ("gate_temperature", "rope_base", "rope_scale", "norm_eps"):
            check_number(name, getattr(self, name), above=0.0)
        given = {"gate_temperature": 1.0, "gate_init": "xavier", "stopgrad_gates": False}
        given = [f"{name}={v!r}" for name, w in given.items() if (v := getattr(self, name)) != w]
        if self.gate == "uniform" and given:
            raise ValueError(
                f"gate='uniform' has no parameters, so that {', '.join(given)} would change "
                "nothing; leave it out, or take gate='sigmoid', 'linear' or 'softmax'"
            )
        layer_range(self.checkpoint, self.layers)

    @property
    def value_size(self) -> int:
        """Head dim of values, DV: `value_dim`, or head_dim if that is None."""
        return self.value_dim or self.head_dim

    @property
    def mlp_size(self) -> int:
        """Hidden width of SwiGLU: `mlp_hidden`, or 8/3 dim to the nearest multiple of 16. So
        SwiGLU's three matrices have the size of the case study's two of 4 dim."""
        return self.mlp_hidden or max(16, round(8 * self.dim / 3 / 16) * 16)

    def with_(self, **changes: Any) -> "ModelConfig":
        """Copy with some fields changed; `nsa={"window": 64}` changes fields of the NSAConfig."""
        check_names(type(self), changes)
        if isinstance(changes.get("nsa"), dict):
            check_names(NSAConfig, changes["nsa"], prefix="nsa.")
            changes["nsa"] = replace(self.nsa, **changes["nsa"])
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` restores the same config."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Restore the config from `to_dict`. Raises ValueError for names unknown or missing."""
        check_complete(cls, values)
        nested = values.get("nsa", {})
        if isinstance(nested, dict):
            check_names(NSAConfig, nested, prefix="nsa.")
            nested = NSAConfig(**nested)
        return cls(**{**values, "nsa": nested})


def layer_range(text: str, layers: int) -> range:
    """Layers for "", "all", "start:end", ":end" or "start:"; the end is not included.

    Raises ValueError for anything else and for a range outside 0:layers, which is not clamped:
    "0:12" of a 6-layer model is treated as a mistake.
    """
    legal = f"'', 'all' or 'start:end' with 0 <= start < end <= {layers}"
    if text in ("", "all"):
        return range(layers if text else 0)
    bounds = re.fullmatch(r"(\d*):(\d*)", text, re.ASCII) if isinstance(text, str) else None
    if not bounds:
        raise ValueError(f"checkpoint={text!r} is not a layer range; legal are {legal}")
    chosen = range(int(bounds[1] or 0), int(bounds[2] or layers))
    if not 0 <= chosen.start < chosen.stop <= layers:
        raise ValueError(f"checkpoint={text!r} does not fit {layers} layers; legal are {legal}")
    return chosen


def check_int(name: str, value: Any, least: int = 1) -> int:
    """Return `value` as an int, see `as_int`; raises ValueError below `least`."""
    value = as_int(name, value)
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")
    return value


def keep_int(owner: Any, name: str, least: int = 1) -> None:
    """Convert a field of a frozen dataclass to an int by `check_int`."""
    object.__setattr__(owner, name, check_int(name, getattr(owner, name), least))


def check_config(config: Any) -> None:
    """Raise TypeError unless `config` is a ModelConfig, naming the config that holds one."""
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config {other_than('ModelConfig', config)}")


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless the value is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a bool")


def check_number(name: str, value: Any, **bounds: float) -> None:
    """Raise TypeError unless the value is a number, ValueError unless it is finite and in bounds.
    `least` is inclusive; `above` and `below` are exclusive bounds."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        hint = "; YAML reads 1e-4 as text and 1.0e-4 as a number" if isinstance(value, str) else ""
        raise TypeError(f"{name}={value!r} is not a number{hint}")
    told = {"least": "at least", "above": "greater than", "below": "less than"}
    holds = {"least": operator.ge, "above": operator.gt, "below": operator.lt}
    if not isfinite(value) or not all(holds[k](value, bound) for k, bound in bounds.items()):
        wanted = " and ".join(f"{told[kind]} {bound:g}" for kind, bound in bounds.items())
        raise ValueError(f"{name}={value} must be finite and {wanted}")


def check_complete(owner: type, given: dict[str, Any]) -> None:
    """Raise ValueError for a name that is no field of `owner`, and for missing required fields."""
    check_names(owner, given)
    needed = [f.name for f in fields(owner) if f.default is f.default_factory is MISSING]
    if missing := [name for name in needed if name not in given]:
        raise ValueError(
            f"{owner.__name__} needs {', '.join(missing)} as well; it got "
            f"{', '.join(given) or 'nothing'}"
        )


def check_names(owner: type, given: dict[str, Any], prefix: str = "") -> None:
    """Raise ValueError for a name that is no field of `owner`, with the nearest one."""
    known = [prefix + f.name for f in fields(owner)]
    for name in given:
        if prefix + name not in known:
            hint = nearest(prefix + name, known)
            raise ValueError(f"{owner.__name__} has no field {prefix}{name}; {hint}")
