"""Problems for the kernels of specialized warps, and what these make of the selected branch."""

from functools import partial

import torch
from backend_calls import DEVICE
from selected_cases import BRANCH, with_sinks
from selected_cases import Case as Chosen
from span_cases import Case

from nsa.blocks import compressed_span
from nsa.config import NSAConfig
from nsa.kernels.selected_dq import selected_dq
from nsa.kernels.selected_fwd import selected_forward
from nsa.kernels.selected_plan import Plan, plan
from nsa.kernels.sequences import dense
from nsa.kernels.span_fwd import span_forward

OF_BLOCKS = {"select_block": 64, "dim": 64, "value_dim": 64, "dtype": "fp16"}
FINE = NSAConfig(2, 1, 4, 4, window=6)
FEW = Chosen((150,), group=4, slots=3, **OF_BLOCKS)  # of one head


def plan_of(case: Chosen, given: dict) -> Plan:
    """The plan of these blocks, made once: it is by Triton's kernels, whatever runs then."""
    if "plan" not in given:
        given["plan"] = plan(given["blocks"], case.sequences(), case.group)
    return given["plan"]


def selected(case: Chosen, given: dict, **options) -> dict[str, torch.Tensor]:
    """o, lse2, dq and delta of the selected branch by specialized warps.

    base and out, as of `selected_forward`, are of the forward alone.
    """
    sequences, q, k, v = case.sequences(), given["q"], given["k"], given["v"]
    planned = plan_of(case, given)
    gates, by, scale = given.get("gates"), options.pop("specialized", True), case.dim**-0.5
    sink2, _ = with_sinks(given, q.new_empty(0))
    o, lse2 = selected_forward(
        q, k, v, planned, sequences, scale, gates=gates, specialized=by, sink2=sink2, **options
    )
    found = {"o": o, "lse2": lse2}
    return found if options else found | selected_backward(case, given, o, lse2, by)


def selected_backward(case: Chosen, given: dict, o, lse2, by=True) -> dict[str, torch.Tensor]:
    """dq and delta alone, by what a forward left."""
    sequences, (q, k, v, do) = case.sequences(), (given[name] for name in ("q", "k", "v", "do"))
    planned = plan_of(case, given)
    _, rows = with_sinks(given, lse2)
    backward = q, k, v, do, rows.lse2, given.get("gates"), BRANCH, planned, sequences
    dq, delta = selected_dq(*backward, case.dim**-0.5, o=o, kept=rows.kept, specialized=by)
    return {"dq": dq, "delta": delta}


def scored(sizes: tuple, config: NSAConfig, group: int, kv_heads: int, number: int = 0) -> tuple:
    """Arguments of `select_blocks`."""
    sequences, scale = dense(*sizes, config), 0.125
    dtype = torch.float16 if number % 2 else torch.bfloat16
    generator = torch.Generator(DEVICE).manual_seed(number)
    drawn = partial(torch.randn, dtype=dtype, generator=generator, device=DEVICE)
    q = drawn(sequences.tokens.rows, kv_heads * group, 64)
    k_cmp = drawn(sequences.compressed.rows, kv_heads, 64)
    along = compressed_span(config), sequences.tokens, sequences.compressed, scale
    _, lse2 = span_forward(q, k_cmp, k_cmp, *along, specialized=False)
    return q, k_cmp, lse2, sequences, scale


def by_warps(case: Case, number: int) -> Case:
    dtype = torch.float16 if number % 2 else torch.bfloat16
    return Case(**{**vars(case), "tile": None, "specialized": True, "dtype": dtype})
