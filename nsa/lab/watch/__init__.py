"""How far a training has come, counted where others can read it while it is stuck."""

from nsa.lab.watch.progress import Progress, Unheard, event, read

__all__ = ["Progress", "Unheard", "event", "read"]
