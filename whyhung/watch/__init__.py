"""How far a training has come, counted where others can read it while it is stuck."""

from whyhung.watch.progress import Progress, Unheard, event, read

__all__ = ["Progress", "Unheard", "event", "read"]
