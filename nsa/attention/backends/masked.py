"""masked: one dense matmul per branch with a boolean mask.

Holds T x T scores and probabilities for every head and branch (T x T/d for the compressed one),
in fp32, for the backward pass: the simplest code and the highest memory. The product q k is a
plain torch matmul, so in fp16 it overflows beyond 65504 before the scale is applied.
"""

from nsa.attention.branches import visible_by_branch
from nsa.attention.inputs import Inputs
from nsa.attention.registry import Backend, Branches, Note
from nsa.attention.transforms import ALL
from nsa.reference.attend import attend


def run(inputs: Inputs, note: Note) -> Branches:
    """(o [B, T, HQ, DV], lse) of each branch."""
    outputs = {}
    for branch, k, v, visible in visible_by_branch(inputs, note):
        o, lse = attend(inputs.q, k, v, visible, inputs.scale)
        outputs[branch] = o, lse if inputs.needs_lse else None  # its graph holds the scores
        note(branch, "dense-mask-matmul")
    return outputs


BACKEND = Backend(
    "masked",
    run,
    summary="one dense matmul a branch under a mask; T x T a head",
    quadratic=True,
    transforms=ALL,
)
