"""Progress of a training, counted where other processes can read it while it is stuck."""

from whyhung.watch.progress import Progress, Unheard, event, read

__all__ = ["Progress", "Unheard", "event", "read"]
