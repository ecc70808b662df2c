"""Has nsa.lab.watch.inside begin in this Python process once torch has been imported in it.

Runs in whatever environment the program uses: it knows this package by its place alone, then runs
the environment's own sitecustomize. What goes wrong goes to a file; the program never hears of it.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_HOME = os.path.abspath(os.path.join(_HERE, *[os.pardir] * 4))
_INSIDE = os.path.join("lab", "watch", "inside.py")


class _Torch:
    """Finds torch as everybody else does."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        spec = next(filter(None, (f.find_spec(name, path, target) for f in others)), None)
        plain = getattr(getattr(spec, "loader", None), "exec_module", None)

        def exec_module(module):
            plain(module)
            del spec.loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _begin()

        if plain is not None:
            spec.loader.exec_module = exec_module
        return spec


class _Ours:
    """Finds this package where the program's own path has none."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, [_HOME]) if name == "nsa" else None


def _begin():
    try:
        from importlib.util import find_spec

        sys.meta_path.append(_Ours)
        found = find_spec("nsa")  # the program's own comes first: to import it is for the program
        places = found.submodule_search_locations or ()
        if not any(os.path.isfile(os.path.join(place, _INSIDE)) for place in places):
            raise ImportError(f"the program has another nsa, {found.origin}: nothing is counted")
        from nsa.lab.watch import inside

        inside.loaded()
    except Exception:
        _say()


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
