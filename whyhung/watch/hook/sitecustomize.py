"""Start whyhung.watch.inside in this Python process once torch has been imported in it.

Runs in any environment that the program uses: it finds this package by its path alone, then runs
the environment's own sitecustomize. Errors are written to a file and never reach the program.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_HOME = os.path.abspath(os.path.join(_HERE, *[os.pardir] * 3))
_INSIDE = os.path.join("watch", "inside.py")
_WAITS_S = 30.0


class _Torch:
    """Find torch through the other finders, and hook its import."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        spec = next(filter(None, (f.find_spec(name, path, target) for f in others)), None)
        plain = getattr(getattr(spec, "loader", None), "exec_module", None)

        def _call_with_frames_removed(module):
            try:
                plain(module)
            finally:
                del spec.loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                spec._initializing = False  # it is complete, and our thread may import it
                _aside(_begin)

        # With that name its frame is hidden from tracebacks, like those of an import.
        exec_module = _call_with_frames_removed
        code = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")
        exec_module.__code__ = code
        if plain is not None:
            spec.loader.exec_module = exec_module
        return spec


class _Ours:
    """Find this package if the program's own path has none."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, [_HOME]) if name == "whyhung" else None


def _aside(do):
    """Call `do` in a thread of ours and wait: an exception that a signal handler raises meanwhile
    belongs to the program, and would be lost among our own errors."""
    import _thread
    import signal

    ours = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "whyhung"]
    # A program of this package: our thread waits for its imports, so it must not wait for us.
    busy = any(getattr(getattr(m, "__spec__", None), "_initializing", False) for m in ours)
    over = _thread.allocate_lock()
    over.acquire()

    def run():
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        do()
        over.release()

    _thread.start_new_thread(run, ())
    if not busy:
        over.acquire(timeout=_WAITS_S)


def _begin():
    try:
        from importlib.util import find_spec

        sys.meta_path.append(_Ours)
        found = find_spec(
            "whyhung"
        )  # the program's own comes first: to import it is for the program
        places = found.submodule_search_locations or ()
        if not any(os.path.isfile(os.path.join(place, _INSIDE)) for place in places):
            raise ImportError(
                f"the program has another whyhung, {found.origin}: nothing is counted"
            )
        from whyhung.watch import inside

        inside.loaded()
    except Exception:
        _say()
    finally:
        sys.meta_path.remove(_Ours)  # later imports are found through the package itself


def _say():
    try:
        import traceback

        name = f"error-{os.getpid()}.txt"
        with open(os.path.join(os.environ["NSA_WATCH_FOLDER"], name), "a") as file:
            traceback.print_exc(file=file)
    except Exception:
        return


if os.environ.get("NSA_WATCH_FOLDER"):
    sys.meta_path.insert(0, _Torch())
sys.path[:] = [place for place in sys.path if place != _HERE]
_ours = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401  the environment's own
except ImportError as _error:
    if _error.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _ours
