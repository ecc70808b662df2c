"""The loop and its first defect under several versions of torch, each in its own interpreter.

    python -m workbook.rooms.case_study.loop.versions /path/of/venv/bin/python [...]

prints the results of the same steps with this interpreter's torch and the others', as JSON.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from whyhung.process import interpreters, trial
from workbook.runs import environment

SUBJECT = "workbook.rooms.case_study.loop.versions:measured"
COUNTS = ("forward", "backward", "nodes", "syncs")


def measured(spec: dict[str, Any]) -> dict[str, Any]:
    """Run in one interpreter: three steps of the loop, its counts, and `one_query`.

    spec: settings of workbook.rooms.case_study.loop.subject. Gradients are reported as norms, in
    the order of the parameters, after the first backward.
    """
    import platform

    import torch

    from workbook.rooms.case_study.loop.measure import count
    from workbook.rooms.case_study.loop.subject import ExhibitLoop

    loop = ExhibitLoop(spec)
    batch = loop.batch(0)
    counted = count(lambda: loop.model(*batch)[1])
    norms = [p.grad.norm().item() for p in loop.model.parameters()]
    loop.model.zero_grad(set_to_none=True)
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        **{name: getattr(counted, name) for name in COUNTS},
        "by_name": dict(counted.by_name),
        "gradients": norms,
        "losses": [loop.step(i).item() for i in range(3)],
        "one_query": one_query(spec.get("device", "cpu")),
    }


def one_query(device: str = "cpu", keys: int = 32) -> dict[str, float]:
    """Attention of torch for one query with is_causal=True, against `keys` keys.

    {"first": how far it is from the first value, "all": from attention over all keys, "grad_q",
    "grad_k": the largest gradients in units of those over all keys}: its mask is aligned with the
    first key, so that all but "all" are 0, and no key or query is learnt.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attention

    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 16, generator=drawn) for n in (1, keys, keys))
    q, k, v = (x.to(device).requires_grad_() for x in (q, k, v))
    o, whole = attention(q, k, v, is_causal=True), attention(q, k, v)
    mine, all_keys = (torch.autograd.grad(x.square().sum(), (q, k)) for x in (o, whole))
    largest = [float(a.abs().max() / b.abs().max()) for a, b in zip(mine, all_keys, strict=True)]
    apart = {"first": o - v[:, :, :1], "all": o - whole}
    found = {name: x.abs().max().item() for name, x in apart.items()}
    return found | dict(zip(("grad_q", "grad_k"), largest, strict=True))


def compared(pythons: Sequence[str | None], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """`measured` by each interpreter (None: this one), and the distance of each from the first.

    Adds "loss_apart" and "gradients_apart", relative, and "more" operations by name.

    Raises ValueError for an interpreter that cannot run it, RuntimeError for one whose child fails.
    """
    rows: list[dict[str, Any]] = []
    for python in pythons:
        if python is not None:
            interpreters.check(python, SUBJECT)
        ended = trial.run_child(SUBJECT, settings, deadline_s=600.0, python=python)
        if ended.status != "ok":
            raise RuntimeError(
                f"python={python or sys.executable}: {ended.status}, {ended.message}"
            )
        row = ended.result
        first = rows[0] if rows else row
        rows.append(row | {
            "loss_apart": _apart(first["losses"], row["losses"]),
            "gradients_apart": _apart(first["gradients"], row["gradients"]),
            "more": _more(first["by_name"], row["by_name"]),
        })  # fmt: skip
    return rows


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest relative difference of two lists; 0 for two zeros."""
    return max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in zip(one, other, strict=True))


def _more(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Extra dispatches of each operation by `other`, where the two differ."""
    apart = {name: other.get(name, 0) - one.get(name, 0) for name in sorted(one | other)}
    return {name: n for name, n in apart.items() if n}


def main(pythons: Sequence[str]) -> None:
    """Print a row for each interpreter: a tiny loop, and a single layer."""
    designs = {"tiny": ({}, 128), "production": ({"layers": 1}, 256)}
    found = []
    for name, (changes, tokens) in designs.items():
        settings = {"design": name, "changes": changes, "tokens": tokens, "threads": 1}
        rows = compared([None, *pythons], settings)
        for row in rows:
            del row["gradients"], row["by_name"]
        found.append({"settings": settings, "rows": rows})
    print(json.dumps({"environment": environment.snapshot(), "designs": found}, indent=1))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"versions: {error}")
