"""Hooks that feed a Progress: modules whose forward ends, nodes that a backward runs, events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nsa.lab.evidence import PHASES
from nsa.lab.progress.counters import FIRED, MODULES, PHASE, TOTAL

if TYPE_CHECKING:
    from nsa.lab.progress.progress import Progress

MOST_HOOKS = 256  # of one backward: each costs 2 to 3 us, and a finer count tells nobody more
MOST_EVENTS = 4096  # under way on a device
OTHER = PHASES.index("other")
Undo = Callable[[], Any]


def modules_of(model: nn.Module, progress: Progress) -> list[Undo]:
    """Counts the forwards of a model and of all modules inside it."""
    ended, begins = _ended(progress), _begins(progress)
    handles = [model.register_forward_pre_hook(begins)]
    handles += [module.register_forward_hook(ended) for module in model.modules()]
    return [handle.remove for handle in handles]


def all_modules(progress: Progress) -> list[Undo]:
    """Counts every module's forward in this process."""
    return [
        nn.modules.module.register_module_forward_pre_hook(_begins(progress)).remove,
        nn.modules.module.register_module_forward_hook(_ended(progress)).remove,
    ]


def _begins(progress: Progress) -> Callable[..., None]:
    def begins(module: nn.Module, arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not progress.told and progress.cells[PHASE] == OTHER:
            progress.enter("forward")

    return begins


def _ended(progress: Progress) -> Callable[..., None]:
    def ended(module: nn.Module, arguments: Any, output: Any) -> None:
        # Inside a compiled region nothing must be left of this.
        if torch.compiler.is_compiling():
            return
        cells = progress.cells
        cells[MODULES] += 1
        if not cells[MODULES] & 15:
            progress.mark()

    return ended


def optimizers(progress: Progress) -> list[Undo]:
    """Guesses the phase from any optimizer's step."""
    from torch.optim import optimizer

    def begins(*_: Any) -> None:
        if not progress.told:
            progress.enter("optimizer")

    def ended(*_: Any) -> None:
        if not progress.told:
            progress.enter("other")

    return [
        optimizer.register_optimizer_step_pre_hook(begins).remove,
        optimizer.register_optimizer_step_post_hook(ended).remove,
    ]


def backwards(progress: Progress) -> list[Undo]:
    """Counts the nodes of every backward() and grad() that this process calls from Python."""
    undo: list[Undo] = []
    for name, roots in (("backward", "tensors"), ("grad", "outputs")):
        plain = getattr(torch.autograd, name)

        def counted(*args: Any, _plain: Any = plain, _roots: str = roots, **options: Any) -> Any:
            given = args[0] if args else options.get(_roots, ())
            if torch.compiler.is_compiling():
                return _plain(*args, **options)
            retained = bool(options.get("retain_graph") or options.get("create_graph"))
            with backward(_tensors(given), progress, retained=retained):
                return _plain(*args, **options)

        setattr(torch.autograd, name, counted)
        undo.append(lambda name=name, plain=plain: setattr(torch.autograd, name, plain))
    return undo


def _tensors(given: Any) -> Sequence[Any]:
    return [given] if isinstance(given, Tensor) else list(given)


@contextmanager
def backward(roots: Sequence[Any], progress: Progress, *, retained: bool = False) -> Iterator[None]:
    """Around a backward from `roots`: its nodes are counted as they are about to run.

    Of more than MOST_HOOKS nodes every n-th is counted, for n. Gradient accumulators are not: they
    outlive the graph. Nodes that a backward leaves out count as run when it has ended.
    """
    cells = progress.cells
    phase = PHASES[cells[PHASE]]
    if not progress.told:
        progress.enter("backward")
    first, before_it = cells[FIRED], cells[TOTAL]
    nodes = _nodes(roots, cells)
    cells[TOTAL] = before_it + len(nodes)
    every = 1 + len(nodes) // MOST_HOOKS

    def fired(gradients: Any) -> None:
        cells[FIRED] += every
        if not cells[FIRED] // every & 15:
            progress.mark()

    hooked = nodes[every // 2 :: every]
    handles = [node.register_prehook(fired) for node in hooked]
    del nodes, hooked
    try:
        yield
        cells[FIRED] = first + cells[TOTAL] - before_it
    finally:
        if retained:  # they would count again
            for handle in handles:
                handle.remove()
        if not progress.told:
            progress.enter(phase if phase == "backward" else "other")


def _nodes(roots: Sequence[Any], cells: memoryview) -> list[Any]:
    """Of the graphs behind `roots`, those that do something: all but gradient accumulators.

    The walk takes 1 to 2 us a node, so of a large graph it shows in the total while it lasts.
    """
    waiting = [root.grad_fn for root in roots if isinstance(root, Tensor) and root.grad_fn]
    seen = set(waiting)
    found = []
    for node in waiting:  # which grows
        following = node.next_functions
        if following:
            found.append(node)
            if not len(found) & 1023:
                cells[TOTAL] += 1024
        for one, _ in following:
            if one is not None and one not in seen:
                seen.add(one)
                waiting.append(one)
    return found


class DeviceEvents:
    """CUDA events recorded along the work: those that the device has passed are progress."""

    def __init__(self) -> None:
        self.quiet = False
        self._waiting: deque[torch.cuda.Event] = deque()

    def record(self) -> bool:
        """Marks this place of the current stream; False while that is not possible."""
        if self.quiet or len(self._waiting) >= MOST_EVENTS:
            return False
        if torch.cuda.is_current_stream_capturing():
            return False
        event = torch.cuda.Event()
        event.record()
        self._waiting.append(event)
        return True

    def passed(self) -> int:
        """How many the device has passed since it was asked last."""
        count = 0
        while not self.quiet and self._waiting and self._waiting[0].query():
            self._waiting.popleft()
            count += 1
        return count
