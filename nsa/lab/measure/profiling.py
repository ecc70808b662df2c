"""torch.profiler, once through, without what it says of further cycles."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator

from torch.profiler import ProfilerActivity, profile


@contextlib.contextmanager
def profiled(activities: Iterable[ProfilerActivity]) -> Iterator[profile]:
    """The work inside is profiled; ask for its events afterwards."""
    found = profile(activities=list(activities))
    start(found)
    try:
        yield found
    finally:
        found.stop()


def start(found: profile) -> None:
    """Starts it. torch 2.11 warns, once a process, of further cycles, of which there are none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        found.start()
