"""Dtypes of a model, its gradients and its optimizer's state, and mismatches among them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves_with_path

from nsa.model import saving
from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel
from workbook.lab.oracles.steps import some

_listed = partial(some, most=3)


@dataclass(frozen=True)
class DtypeReport:
    """`rows`: {part, dtype, tensors, elements, mib} for each part and dtype, the part's most
    elements first; parts are parameters, gradients, optimizer state and buffers. `mismatches`:
    sentences, empty if all dtypes are as expected."""

    rows: list[dict[str, Any]]
    mismatches: list[str]

    def __str__(self) -> str:
        lines = [f"{'part':20}{'dtype':10}{'tensors':>9}{'elements':>16}{'MiB':>12}"]
        lines += [
            f"{row['part']:20}{row['dtype']:10}{row['tensors']:>9,}{row['elements']:>16,}"
            f"{row['mib']:>12,.2f}"
            for row in self.rows
        ]
        return "\n".join([*lines, *(f"MISMATCH: {text}" for text in self.mismatches)])


def dtype_report(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    expected: torch.dtype | None = None,
) -> DtypeReport:
    """Return the dtype report of any module. "gradients" are the existing ones; without any,
    "gradients expected" are those of a backward: one per trained parameter, in its dtype. Optimizer
    state is empty before the first step. A tensor with two names counts once.

    Mismatches are parameters of several floating dtypes, or of another than `expected`; gradients
    whose dtype differs from their parameter's; and optimizer moments narrower than fp32.
    """
    parameters = dict(model.named_parameters())
    there = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    made = {name: p for name, p in parameters.items() if p.requires_grad}
    names = {id(p): name for name, p in parameters.items()}
    held = enumerate(optimizer.state.items() if optimizer else ())
    states = _flat({names.get(id(p), number): state for number, (p, state) in held})
    return _report(parameters, there, made, states, dict(model.named_buffers()), expected)


def preset_report(config: ModelConfig) -> DtypeReport:
    """Return the report for a training of that model after one step; nothing is allocated."""
    with torch.device("meta"):
        model = LanguageModel(config)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return dtype_report(model, optimizer, expected=torch.float32)


def file_report(path: str | Path) -> DtypeReport:
    """Return the report of a checkpoint: of `nsa train`, the newest in a folder of those, or any
    file that torch can load without executing its content. Our checkpoints must match their config:
    fp32 weights, whatever the precision of autocast. Raises ValueError for any other file."""
    path = Path(path)
    if path.is_dir():
        try:
            newest = saving.newest(path)
        except FileNotFoundError as error:
            raise ValueError(str(error)) from None
        return checkpoint_report(newest, torch.float32)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch may raise anything for a foreign file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} is no checkpoint of tensors and plain values ({reason}); "
            "torch.save(model.state_dict(), path) writes one"
        ) from None
    ours = isinstance(content, Mapping) and content.get("format") == saving.FORMAT
    try:
        return checkpoint_report(content, torch.float32 if ours else None)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def checkpoint_report(content: Any, expected: torch.dtype | None = None) -> DtypeReport:
    """Return the report of a loaded checkpoint: a state dict, or a mapping with one under "model",
    "state_dict" or "model_state_dict" and an optimizer's under "optimizer" or
    "optimizer_state_dict". A state dict does not distinguish buffers from parameters: all its
    tensors count as parameters, except integers. Raises ValueError if no tensor is found.
    """

    if not isinstance(content, Mapping):
        raise ValueError(f"it holds a {type(content).__name__}; needed is a mapping of tensors")

    def under(*keys: str) -> Any:
        return next((content[key] for key in keys if isinstance(content.get(key), Mapping)), None)

    model = under("model", "state_dict", "model_state_dict")
    optimizer = under("optimizer", "optimizer_state_dict") or {}
    held = _flat(content if model is None else model)
    parameters = {name: x for name, x in held.items() if x.is_floating_point() or x.is_complex()}
    if not parameters:
        raise ValueError(
            f"no floating-point tensor in it; it holds {', '.join(map(str, content)) or 'nothing'}"
        )
    buffers = {name: x for name, x in held.items() if name not in parameters}
    return _report(parameters, {}, parameters, _flat(optimizer.get("state", {})), buffers, expected)


Tensors = Mapping[str, Tensor]


def _report(
    parameters: Tensors,
    gradients: Tensors,
    trained: Tensors,
    states: Tensors,
    buffers: Tensors,
    expected: torch.dtype | None,
) -> DtypeReport:
    parts = {
        "parameters": parameters,
        "gradients" if gradients else "gradients expected": gradients or trained,
        "optimizer state": states,
        "buffers": buffers,
    }
    rows = []
    for part, tensors in parts.items():
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for x in {_identity(x): x for x in tensors.values()}.values():
            by_dtype[x.dtype].append(x)
        found = [
            {
                "part": part,
                "dtype": _name(dtype),
                "tensors": len(xs),
                "elements": sum(x.numel() for x in xs),
                "mib": sum(x.numel() * x.element_size() for x in xs) / 2**20,
            }
            for dtype, xs in by_dtype.items()
        ]
        rows += sorted(found, key=lambda row: -row["elements"])
    return DtypeReport(rows, list(_mismatches(parameters, gradients, states, expected)))


def _identity(x: Tensor) -> Any:
    """Key that is equal for two names of one tensor, which are two tensors in a state dict."""
    if type(x) in (Tensor, nn.Parameter) and not x.is_meta and x.numel():
        return x.data_ptr(), x.shape, x.dtype
    return id(x)


def _mismatches(
    parameters: Tensors, gradients: Tensors, states: Tensors, expected: torch.dtype | None
) -> Iterator[str]:
    floating = {name: x for name, x in parameters.items() if x.is_floating_point()}
    by_dtype: dict[torch.dtype, list[str]] = defaultdict(list)
    for name, x in floating.items():
        by_dtype[x.dtype].append(name)
    ordered = sorted(by_dtype, key=lambda dtype: -sum(floating[n].numel() for n in by_dtype[dtype]))
    for dtype in ordered[1:]:
        yield (
            f"{_listed(by_dtype[dtype])} {_is(by_dtype[dtype])} {_name(dtype)} where most "
            f"parameters are {_name(ordered[0])}"
        )
    if expected is not None:
        for dtype in ordered:
            if dtype != expected:
                yield (
                    f"{_listed(by_dtype[dtype])} {_is(by_dtype[dtype])} {_name(dtype)}; the config "
                    f"says {_name(expected)}"
                )
    unlike = [n for n, g in gradients.items() if n in parameters and g.dtype != parameters[n].dtype]
    if unlike:
        first = unlike[0]
        yield (
            f"the gradient of {_listed(unlike)} is {_name(gradients[first].dtype)} and the "
            f"parameter {_name(parameters[first].dtype)}"
        )
    # a step count may have any dtype; tensors with a shape are moments
    moments = {n: x for n, x in states.items() if x.dim() and x.is_floating_point()}
    narrow = [n for n, x in moments.items() if torch.finfo(x.dtype).bits < 32]
    if narrow:
        yield (
            f"optimizer state {_listed(narrow)} {_is(narrow)} {_name(states[narrow[0]].dtype)}: "
            "changes below its rounding are lost; fp32 weights have fp32 state"
        )


def _flat(values: Any) -> dict[str, Tensor]:
    """Return every tensor in nested mappings and lists, by its path."""
    leaves = ((path, x) for path, x in tree_leaves_with_path(values) if isinstance(x, Tensor))
    return {".".join(str(*astuple(key)) for key in path): x for path, x in leaves}


def _name(dtype: torch.dtype) -> str:
    short = {torch.float32: "fp32", torch.float64: "fp64"}
    short |= {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return short.get(dtype, str(dtype).removeprefix("torch."))


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
