"""How far a training has come, counted where others can read it while it is stuck."""

from nsa.lab.watch.counters import read
from nsa.lab.watch.progress import Progress, Unheard

__all__ = ["Progress", "Unheard", "read"]
