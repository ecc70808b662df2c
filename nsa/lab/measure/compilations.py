"""Counts what is compiled while code runs: graphs of torch.compile and kernels of Triton."""

import sys


class Compilations:
    """`with Compilations() as seen:`, then `seen.count`, that of this process and its threads.

    Looks at what is loaded and loads nothing: who has not imported torch._dynamo or Triton at the
    end has compiled nothing with it.
    """

    def __init__(self) -> None:
        self.graphs = self.kernels = 0

    @property
    def count(self) -> int:
        return self.graphs + self.kernels

    def __enter__(self) -> "Compilations":
        self._graphs_before = _graphs()
        self._runtime = _triton_runtime()
        if self._runtime is not None:
            self._hook = self._runtime.jit_post_compile_hook
            self._runtime.jit_post_compile_hook = self._compiled
        return self

    def __exit__(self, *error: object) -> None:
        self.graphs = _graphs() - self._graphs_before
        if self._runtime is not None:
            self._runtime.jit_post_compile_hook = self._hook

    def _compiled(self, *args, **kwargs):
        self.kernels += 1
        return self._hook(*args, **kwargs) if self._hook is not None else None


def _graphs() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters["stats"]["unique_graphs"] if utils else 0


def _triton_runtime():
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    runtime = getattr(knobs, "runtime", None)
    return runtime if hasattr(runtime, "jit_post_compile_hook") else None
