"""Peaks by phase and category, from streams whose answers were worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import BASE, entry, snapshot

from workbook.lab.measure.allocations import (
    CATEGORIES,
    Stream,
    add_history,
    blocks_of,
    lifetimes,
    replay,
    timeline,
)


def categories(**sizes):
    return dict.fromkeys(CATEGORIES, 0) | sizes


def training_step() -> Stream:
    stream = Stream()
    stream.alloc(1, 100)  # parameters
    stream.alloc(2, 7)  # a cache
    stream.tag("parameters", [1])
    stream.mark("data")
    stream.alloc(3, 8)
    stream.alloc(4, 500)  # made on the way to the batch
    stream.free(4)
    stream.mark("forward")
    stream.alloc(4, 30)  # kept for the backward
    stream.alloc(5, 60)  # freed in the forward
    stream.free(5)
    stream.alloc(5, 40)  # kept, where a temporary was
    stream.mark("backward")
    stream.alloc(6, 100)  # becomes a gradient
    stream.alloc(7, 20)
    stream.free(7)
    stream.free(5)
    stream.free(4)
    stream.mark("optimizer")
    stream.tag("gradients", [6])
    stream.alloc(8, 200)
    stream.free(6)
    stream.tag("optimizer_state", [8])
    stream.mark("end")
    stream.alloc(9, 10_000)
    return stream


def test_a_training_step_worked_out_by_hand():
    found = replay(training_step())
    base = {"parameters": 100, "resident": 7}
    data = categories(**base, inputs=8, temporaries=500)
    base["inputs"] = 8
    assert found["by_phase_category"] == {
        "data": data,
        "forward": categories(**base, activations=30, temporaries=60),
        "backward": categories(**base, activations=70, gradients=100, temporaries=20),
        "optimizer": categories(**base, gradients=100, optimizer_state=200),
    }
    peaks = {"data": 615, "forward": 205, "backward": 305, "optimizer": 415}
    assert (found["phases"], found["peak"], found["by_category"]) == (peaks, 615, data)
    most = {"activations": 70, "gradients": 100, "optimizer_state": 200, "temporaries": 500}
    assert found["held"] == categories(**base, **most)
    assert found["cross_check"]["unknown_frees"] == found["cross_check"]["lost_bytes"] == 0


def test_what_the_backward_changes_is_told_by_category():
    lives = lifetimes(training_step())
    start, end = next((a, b) for phase, a, b in lives.spans if phase == "backward")
    assert lives.held(start) == categories(parameters=100, resident=7, inputs=8, activations=70)
    assert lives.held(end) == categories(parameters=100, resident=7, inputs=8, gradients=100)


@pytest.mark.parametrize("most", [3, 1000])
def test_a_timeline_has_the_peak_however_few_points_it_has(most):
    found = timeline(training_step(), most)
    assert len(found["events"]) <= max(most, 18)
    held = [sum(levels) * 2**20 for levels in zip(*found["mib"].values(), strict=True)]
    assert max(held) == pytest.approx(615, abs=120)  # four digits of a MiB are 100 bytes
    assert [name for name, _ in found["phases"]] == ["data", "forward", "backward", "optimizer"]
    assert found["events"] == sorted(found["events"])


def test_a_phase_has_what_was_alive_when_it_started_and_the_highest_peak_of_all_its_times():
    stream = Stream()
    stream.alloc(9, 5)
    for size in (10, 30, 20):
        stream.mark("forward")
        stream.alloc(1, size)
        stream.mark("backward")
        stream.free(1)
    stream.mark("optimizer")
    assert replay(stream)["phases"] == {"forward": 35, "backward": 35, "optimizer": 5}


def test_frees_that_do_not_fit_are_counted_and_change_nothing():
    stream = Stream()
    stream.mark("forward")
    stream.free(99)
    stream.alloc(1, 10)
    stream.alloc(1, 20)  # its free was lost
    found = replay(stream)
    assert found["cross_check"] == {"events": 3, "unknown_frees": 1, "lost_bytes": 10}
    assert found["peak"] == 20


def test_a_tag_names_the_block_that_lives_there_then_and_no_later_one():
    stream = Stream()
    stream.mark("forward")
    stream.alloc(1, 10)
    stream.tag("gradients", [1, 2])
    stream.free(1)
    stream.alloc(1, 16)
    found = replay(stream)
    assert found["by_category"] == categories(activations=16)
    assert found["held"]["gradients"] == 10


def test_streams_that_cannot_be_replayed_are_refused():
    with pytest.raises(ValueError, match="marks no phase"):
        replay(Stream())
    with pytest.raises(ValueError, match="no category 'weights'; there are parameters"):
        Stream().tag("weights", [1])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(0, 2**40)),
        st.tuples(st.just("free"), st.integers(0, 100)),
        st.tuples(st.just("mark"), st.sampled_from(["data", "forward", "backward", "end"])),
        st.tuples(st.just("tag"), st.sampled_from(CATEGORIES[:3])),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_any_stream_has_the_peaks_of_a_naive_replay(steps):
    stream, live, phase, naive = Stream(), {}, "data", {"data": 0}
    stream.mark("data")
    for number, (what, value) in enumerate(steps):
        if what == "alloc":
            stream.alloc(number, value)
            live[number] = value
        elif what == "free" and live:
            address = sorted(live)[value % len(live)]
            stream.free(address)
            del live[address]
        elif what == "mark":
            stream.mark(value)
            phase = value
        elif what == "tag":
            stream.tag(value, sorted(live)[:2])
        if phase != "end":
            naive[phase] = max(naive.get(phase, 0), sum(live.values()))
    found = replay(stream)
    assert found["phases"] == naive
    assert found["peak"] == max(naive.values())
    for phase, by_category in found["by_phase_category"].items():
        assert sum(by_category.values()) == found["phases"][phase]
        assert all(0 <= by_category[name] <= found["held"][name] for name in CATEGORIES)
    assert found["cross_check"]["unknown_frees"] == found["cross_check"]["lost_bytes"] == 0


def history(taken, device=0, most=100):
    """Entries that are added, as (address, bytes), a free with -1; and the reason why none are."""
    stream = Stream()
    why = add_history(stream, taken, device, most)
    return list(zip(stream.addresses, stream.sizes, strict=True)), why


def test_blocks_in_use_are_found_where_they_lie():
    states = ("active_allocated", "inactive", "active_pending_free", "active_allocated")
    sizes = (512, 1024, 512, 2048)
    taken = snapshot([], zip(states, sizes, sizes, strict=True))
    assert blocks_of(taken, 0) == {BASE: 512, BASE + 2048: 2048}


def test_a_segment_of_another_device_is_left_out():
    taken = snapshot([], [("active_allocated", 512, 4)], device=1)
    assert blocks_of(taken, 0) == {} and blocks_of(taken, 1) == {BASE: 512}
    assert history(taken, device=3) == ([], "")


def test_sizes_are_rounded_and_those_still_alive_are_true():
    trace = [
        entry("segment_alloc", 0, 20 * 2**20),
        entry("alloc", 0, 100),  # came and went: only the rounding is known
        entry("free_requested", 0, 100),
        entry("free_completed", 0, 100),
        entry("alloc", 0, 1_048_577),  # got 1 MiB more than it asked for
        entry("alloc", 4 * 2**20, 1),
    ]
    large, small = ("active_allocated", 4 * 2**20, 1_048_577), ("active_allocated", 512, 1)
    events, _ = history(snapshot(trace, [large, small]))
    assert events == [(BASE, 512), (BASE, -1), (BASE, 4 * 2**20), (BASE + 4 * 2**20, 512)]


def test_a_free_counts_when_it_is_requested_and_once():
    trace = [entry("alloc", 0, 512), entry("free_requested", 0, 512)]
    for more in ([], [entry("free_completed", 0, 512)]):
        assert history(snapshot(trace + more, [])) == ([(BASE, 512), (BASE, -1)], "")


def test_a_history_that_overflowed_is_not_replayed():
    taken = snapshot([entry("alloc", 0, 512)] * 5, [])
    assert history(taken, most=5) == ([], "the history overflowed 5 entries")
    events, why = history(taken, most=6)
    assert len(events) == 5 and why == ""
