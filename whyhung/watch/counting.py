"""Hooks that feed a Progress: modules whose forward ends, nodes that a backward runs.

Also counts how much of its enqueued work a device has completed.
"""

from __future__ import annotations

import operator
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from whyhung.watch.evidence import PHASES
from whyhung.watch.layout import FIRED, MODULES, PHASE, TOTAL

if TYPE_CHECKING:
    from whyhung.watch.progress import Progress

MOST_EVENTS = 4096  # under way on a device
MOST_HOOKS = 256  # of one backward: each costs 5 us, and a finer count adds no information
MOST_BETWEEN = 128  # nodes from one hooked output to the next; else the graph is walked
SHORT_S = 1.0  # a backward that takes longer can afford the walk, and a finer count
APART = 64  # nodes, about, between hooked outputs; fewer where that leaves not FEW_HOOKS of them
FEW_HOOKS = 24
OTHER = PHASES.index("other")
KEEPS = "retain_graph", "create_graph"
_nodes_made = torch.autograd._get_sequence_nr  # by this thread
Undo = Callable[[], Any]


class DeviceEvents:
    """CUDA events recorded along the work: those that the device has passed are progress.

    Each event that the querying thread queries or frees holds the GIL for a moment, which delays
    the training: so it queries few of them, and events are reused.
    """

    def __init__(self) -> None:
        self.quiet = False
        self._waiting: deque[tuple[int, torch.cuda.Event]] = deque()  # with their device
        self._spare: dict[int, list[torch.cuda.Event]] = {}

    def record(self) -> bool:
        """Record an event on the current stream; return False while that is not possible."""
        if self.quiet or len(self._waiting) >= MOST_EVENTS:
            return False
        if torch.cuda.is_current_stream_capturing():
            return False
        device = torch.cuda.current_device()
        try:  # several threads record, so there is no check first for a spare event
            event = self._spare[device].pop()
        except (KeyError, IndexError):
            event = torch.cuda.Event()
        event.record()
        self._waiting.append((device, event))
        return True

    def passed(self) -> int:
        """Number of events that the device has passed since the last call, by binary search.

        With several streams, some events may be counted before their stream has reached them.
        """
        count = bisect_left(self._waiting, True, key=lambda x: self.quiet or not x[1].query())
        for _ in range(count):
            device, event = self._waiting.popleft()
            self._spare.setdefault(device, []).append(event)
        return count


def modules_of(model: nn.Module, progress: Progress) -> list[Undo]:
    """Count the forwards of a model and of all modules inside it."""

    def begins(*_: Any) -> None:
        if not is_compiling():
            _begins(progress)

    def ended(module: nn.Module, arguments: Any, output: Any) -> None:
        if not is_compiling():  # inside a compiled region nothing is left of this
            _ended(progress, output)

    handles = [module.register_forward_hook(ended) for module in model.modules()]
    handles.append(model.register_forward_pre_hook(begins))
    return [handle.remove for handle in handles]


def all_modules(progress: Progress) -> list[Undo]:
    """Count every module's forward in this process.

    This replaces `nn.Module.__call__`, since torch's global module hooks send every call through a
    slower path that takes four times as long as the counting.
    """

    def counting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # a compiled region must not depend on what changes
                return plain(module, *args, **kwargs)
            counts = progress.fine and not counted.over
            if counts:
                _begins(progress)
            try:
                output = plain(module, *args, **kwargs)
            except BaseException as error:
                raise_on(error)
                raise
            if counts:
                _ended(progress, output)
            return output

        return counted

    return [in_place_of(nn.Module, "__call__", counting)]


def _begins(progress: Progress) -> None:
    """Guess that a forward begins with this module's call."""
    if not progress.told and progress.cells[PHASE] == OTHER:
        progress.enter("forward")


def _ended(progress: Progress, output: Any) -> None:
    """Count a module's forward that has ended."""
    cells = progress.cells
    cells[MODULES] += 1
    if not cells[MODULES] & 15:
        progress.mark()
    if progress.outputs is not None and not progress.firing:
        progress.outputs.add(output)


class Firing:
    """Set FIRED as a backward runs: each node with `hook` as its prehook writes the next of
    `values`, and leaves FIRED unchanged when they are used up.

    The hook runs entirely in C. Python code in it would run signal handlers in the middle of a
    backward, where an unwatched program runs none; and the C hook costs a third as much.
    """

    def __init__(self, progress: Progress) -> None:
        self.values: list[int] = []
        cells = map(getattr, repeat(progress), repeat("cells"))
        moves = map(operator.setitem, cells, repeat(FIRED), iter(self.values))
        self.hook = partial(next, moves)  # its own argument, where there is no next: all stays

    def shift(self, nodes: int) -> None:
        """Add `nodes` to the values that are left: another backward inside this one ran them."""
        self.values[:] = [value + nodes for value in self.values]


class Outputs:
    """Module outputs of one forward: hooks on their autograd nodes count the progress of its
    backward, so that the graph need not be walked.

    A thread numbers its nodes in order of creation, and a backward runs them in reverse. So
    when an output's node runs, all nodes with higher numbers have run. The first forward, and any
    after one whose outputs were too far apart or whose backward was slow, only measures the
    distance between outputs.
    """

    def __init__(self, progress: Progress, apart: int = 0, *, hooks: bool = False) -> None:
        """apart: minimum number of nodes between counted outputs."""
        self._progress, self._apart, self._hooks = progress, apart, hooks
        self._first = self._last = _nodes_made()
        self._widest, self._made, self._near, self._began = 0, 0, False, 0.0
        self.firing, self._numbers = Firing(progress), list[int]()

    def renew(self) -> None:
        """Discard the outputs recorded so far: a step begins."""
        self._progress.outputs = Outputs(self._progress, self._apart, hooks=self._hooks)

    def add(self, output: Any) -> None:
        if _nodes_made() - self._last <= self._apart:
            return  # no node can be far enough; reading the output's own number costs more
        node = output.grad_fn if isinstance(output, Tensor) else None
        if node is None:
            return
        number = node._sequence_nr()
        between = number - self._last
        if between > self._apart:
            self._last, self._widest = number, max(self._widest, between)
            if self._hooks:
                node.register_prehook(self.firing.hook)
                self._numbers.append(number)
                _mark(self._progress, node, len(self._numbers) & 7)

    def begin(self) -> int:
        """Number of nodes to run; 0 without hooks here, where a walk has to count them."""
        self._began, end = time.monotonic(), _nodes_made()
        self._made = end - self._first
        widest = max(self._widest, end - self._last)
        self._near = widest <= MOST_BETWEEN < self._made
        if not (self._near and self._hooks):
            return 0
        before = self._progress.cells[FIRED]
        self.firing.values[:] = [before + end - (n + 1) for n in reversed(self._numbers)]
        return self._made

    def end(self) -> None:
        """End the backward: hooks that have not run yet no longer count anything."""
        self.firing.values.clear()
        apart, short = min(self._made // FEW_HOOKS, APART), time.monotonic() - self._began < SHORT_S
        self._progress.outputs = Outputs(self._progress, apart, hooks=self._near and short)


def _mark(progress: Progress, node: Any, number: int) -> None:
    """Record a device event before every n-th node (`number` is 0), where there is a device."""
    if not number and progress._device is not None:
        node.register_prehook(lambda _: progress.mark())


def optimizers(progress: Progress) -> list[Undo]:
    """Guess the phase from any optimizer's step."""
    from torch.optim import optimizer

    begins = optimizer.register_optimizer_step_pre_hook(lambda *_: progress.guess("optimizer"))
    ended = optimizer.register_optimizer_step_post_hook(lambda *_: progress.guess("other"))
    return [begins.remove, ended.remove]


def backwards(progress: Progress) -> list[Undo]:
    """Count the nodes of every backward() and grad() that this process calls from Python."""

    def counting(plain: Callable[..., Any], roots: str, kept: int) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if is_compiling():
                return plain(*args, **options)
            counts = None
            try:
                if progress.fine and not counted.over:
                    given = args[0] if args else options.get(roots, ())
                    given = [given] if isinstance(given, Tensor) else list(given)
                    # Positional too, as Tensor.backward passes them.
                    keeps = [*args[kept : kept + 2], *map(options.get, KEEPS)]
                    counts = Backward(progress, retained=any(keeps))
                    counts.begin(given)
                found = plain(*args, **options)
                if counts is not None:
                    counts.done()
                return found
            except BaseException as error:
                raise_on(error)
                raise
            finally:
                if counts is not None:
                    counts.end()

        return counted

    # Name of the roots, and position of retain_graph, which precedes create_graph.
    places = {"backward": ("tensors", 2), "grad": ("outputs", 3)}
    return [
        in_place_of(torch.autograd, name, partial(counting, roots=roots, kept=kept))
        for name, (roots, kept) in places.items()
    ]


def in_place_of(owner: Any, name: str, counting: Callable[..., Any]) -> Undo:
    """Replace the owner's function by counting(plain); several wrappers may count at once.

    They end in any order: one that is `over` calls the next, and is removed when no wrapper
    above it still counts.
    """
    plain = getattr(owner, name)
    counted = update_wrapper(counting(plain), plain)
    counted.plain, counted.over = plain, False

    def undo() -> None:
        counted.over = True
        now = getattr(owner, name)  # not counted, where another began later
        while getattr(now, "over", False):
            now = now.plain
        setattr(owner, name, now)

    setattr(owner, name, counted)
    return undo


def raise_on(error: BaseException) -> None:
    """Remove the frame that caught `error` from its traceback, before it is raised again there."""
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next


class Backward:
    """A backward whose nodes are counted as they are about to run: try, `begin`, run it, `done`,
    and `end` in any case.

    A short backward is counted by module outputs if there is one every few nodes: see `Outputs`.
    Else the graph is walked, and of more than MOST_HOOKS nodes every n-th counts as n. Gradient
    accumulators are not counted: they outlive the graph. Nodes that a backward skips count as run
    when it has ended.

    Not a generator: a dropped generator runs its cleanup where a signal's exception is lost.
    """

    def __init__(self, progress: Progress, *, retained: bool = False) -> None:
        cells = progress.cells
        self._progress, self._retained = progress, retained
        self._phase, self._fired, self._total = PHASES[cells[PHASE]], cells[FIRED], cells[TOTAL]
        self._depth, self._handles = len(progress.firing), list[Any]()
        # None inside another backward, which recomputes what it needs.
        self._outputs: Outputs | None = None if progress.firing else progress.outputs

    def begin(self, roots: Sequence[Any]) -> None:
        progress, cells, outputs = self._progress, self._progress.cells, self._outputs
        progress.guess("backward")
        progress.backwards += 1
        if outputs is not None and (made := outputs.begin()):
            cells[TOTAL], firing = self._total + made, outputs.firing
        else:
            nodes = _nodes(roots, cells)
            cells[TOTAL] = self._total + len(nodes)
            firing, self._handles = _hooked(nodes, progress)
        progress.firing.append(firing)

    def done(self) -> None:
        self._progress.cells[FIRED] = self._fired + self._progress.cells[TOTAL] - self._total

    def end(self) -> None:
        progress = self._progress
        del progress.firing[self._depth :]
        for outer in progress.firing:
            outer.shift(progress.cells[TOTAL] - self._total)
        if self._outputs is not None:
            self._outputs.end()
        if self._retained:  # they would count again
            for handle in self._handles:
                handle.remove()
        progress.guess(self._phase if self._phase == "backward" else "other")


def _hooked(nodes: Sequence[Any], progress: Progress) -> tuple[Firing, list[Any]]:
    """Counter of these nodes, and handles of its hooks, MOST_HOOKS at most."""
    firing, every, first = Firing(progress), 1 + len(nodes) // MOST_HOOKS, progress.cells[FIRED]
    chosen = nodes[every // 2 :: every]
    firing.values += range(first + every, first + every * len(chosen) + 1, every)
    handles = [node.register_prehook(firing.hook) for node in chosen]
    for number, node in enumerate(chosen):
        _mark(progress, node, number & 15)
    return firing, handles


def _nodes(roots: Sequence[Any], cells: memoryview) -> list[Any]:
    """Nodes of the graphs behind `roots`, except gradient accumulators.

    The walk takes 1 to 2 us per node; on large graphs the total is updated as it goes.
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
