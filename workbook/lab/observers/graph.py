"""Dependencies of a loss, read from its autograd graph before any backward."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn


def unreachable(
    loss: Tensor, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> tuple[str, ...]:
    """Names of the trainable parameters that no gradient of `loss` can reach; 1 to 3 us per node.

    A reached parameter may still get a gradient of zeros, or none from a function that returns
    None for it. A compiled model is one node that reaches all its inputs.

    Raises ValueError if the graph does not show it: a reentrant checkpoint, or parameters that
    FSDP2 has sharded, whose graph holds their unsharded copies.
    """
    asked = [(name, p) for name, p in named_parameters if p.requires_grad]
    if any(hasattr(p, "device_mesh") for _, p in asked):
        raise ValueError(
            "sharded parameters are not in the graph, their unsharded copies are; ask before "
            "fully_shard"
        )
    reached = {id(loss)}
    for node in _nodes([loss]):
        kind = type(node).__name__
        if kind == "AccumulateGrad":
            reached.add(id(node.variable))
        elif kind == "CheckpointFunctionBackward":
            raise ValueError(
                "a reentrant checkpoint hides the parameters inside it from the graph; "
                "checkpoint(..., use_reentrant=False) shows them"
            )
    return tuple(name for name, p in asked if id(p) not in reached)


def count_nodes(roots: Iterable[Tensor]) -> int:
    """Count the autograd nodes behind these tensors, each once; about 1 us per node."""
    return sum(1 for _ in _nodes(roots))


def _nodes(roots: Iterable[Tensor]) -> Iterator[Any]:
    waiting = list({root.grad_fn for root in roots if root.grad_fn is not None})
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
