"""Peaks of what is reserved, by phase, of streams worked out by hand."""

from workbook.lab.estimate.alloc_conf import MIB, Settings
from workbook.lab.estimate.reserved import Peak, replay
from workbook.lab.measure.allocations import Stream


def stream_of(*events) -> Stream:
    """A number of MiB allocates under the id next to it, a negative id frees, a text is a phase."""
    stream = Stream()
    for event in events:
        if isinstance(event, str):
            stream.mark(event)
        elif isinstance(event, tuple):
            stream.alloc(event[0], int(event[1] * MIB))
        else:
            stream.free(event)
    return stream


def mib(peak: Peak) -> tuple[float, float]:
    return peak.allocated / MIB, peak.reserved / MIB


# Weights of 40 MiB; a step frees the gradients of the one before and leaves its own.
STEP = (
    (1, 40), (2, 40),
    "forward", 2, (3, 60), (4, 30), 4,
    "backward", (5, 40), 3,
    "optimizer", (6, 11), 6, "end",
)  # fmt: skip


def test_each_phase_has_its_own_peaks_and_the_whole_has_the_highest():
    found = replay(stream_of(*STEP))
    # Reserved: 40 + 40, then 60; 30 fit into the 40 that were freed; as do the 40 of the gradient.
    assert {phase: mib(peak) for phase, peak in found.phases.items()} == {
        "forward": (130, 140),
        "backward": (140, 140),
        "optimizer": (91, 140),
    }
    assert mib(found.peak) == (140, 140)
    assert found.out_of_memory is None


def test_running_out_tells_where():
    found = replay(stream_of(*STEP), capacity=120 * MIB)
    failed = found.out_of_memory  # at 60 the 40 that were freed were given back
    assert (failed.event, failed.phase, failed.asked) == (4, "forward", 30 * MIB)
    assert (failed.allocated, failed.reserved) == (100 * MIB, 100 * MIB)
    assert mib(found.peak) == (100, 100)
    assert "at event 4, forward" in str(failed)


def test_the_peak_of_what_is_reserved_is_what_is_enough():
    enough = replay(stream_of(*STEP), capacity=140 * MIB)
    assert enough.out_of_memory is None
    assert replay(stream_of(*STEP), capacity=139 * MIB).out_of_memory.phase == "backward"


def test_settings_count_and_pools_and_streams_can_be_told():
    stream = stream_of("forward", (1, 3), (2, 3))
    assert mib(replay(stream, Settings.parse("large_segment_size_mb:11")).peak) == (6, 11)
    assert mib(replay(stream, where=lambda event: (0, event)).peak) == (6, 40)


def test_an_address_given_out_again_was_freed():
    assert mib(replay(stream_of("forward", 9, (1, 30), (1, 40))).peak) == (40, 70)
