"""Progress of a training, counted where other processes can read it while it is stuck."""

from whyhung.watch.layout import read
from whyhung.watch.progress import Progress, Unheard, event

__all__ = ["Progress", "Unheard", "event", "read"]
