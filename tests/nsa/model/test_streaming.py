import sys
import types
from multiprocessing import get_context

import pytest
import torch

from nsa.model import streaming
from nsa.model.streaming import FIRST_WAIT_S, NoText, Stream
from nsa.model.train import Data

TEXTS = [f"document {i}: " + "x" * (i % 7) + "é\0!" for i in range(200)]


class Rows:
    """Stands for the result of `load_dataset(..., streaming=True)`, as far as it is used."""

    def __init__(self, hub, order):
        self.hub, self.order = hub, order

    def shuffle(self, seed, buffer_size):
        self.hub.shuffled = (seed, buffer_size)
        generator = torch.Generator().manual_seed(seed)
        return Rows(self.hub, torch.randperm(len(self.order), generator=generator).tolist())

    def skip(self, count):
        self.hub.skipped.append(count)
        return Rows(self.hub, self.order[count:])

    def __iter__(self):
        for place in self.order:
            self.hub.rows += 1
            if self.hub.failures and self.hub.rows in self.hub.failures:
                raise self.hub.failures.pop(self.hub.rows)
            yield {"text": TEXTS[place]}


class Hub:
    """A module `datasets` whose row number i of all ever sent fails where `failures` says so."""

    def __init__(self):
        self.rows, self.opened, self.skipped, self.shuffled = 0, [], [], None
        self.failures, self.refusals = {}, []

    def load_dataset(self, *args, **options):
        self.opened.append((args, options))
        if self.refusals:
            raise self.refusals.pop(0)
        return Rows(self, list(range(len(TEXTS))))


@pytest.fixture
def hub(monkeypatch):
    found = Hub()
    module = types.ModuleType("datasets")
    module.load_dataset = found.load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return found


@pytest.fixture(autouse=True)
def slept(monkeypatch):
    """Seconds of each sleep, none of which is slept."""
    found = []
    monkeypatch.setattr(streaming.time, "sleep", found.append)
    return found


def stream(folder, **options):
    return Stream(cache=folder, **options)


def stored(texts):
    return b"".join(t.replace("\0", " ").encode() + b"\0" for t in texts)


def read(data, steps, batch=2, tokens=15):
    """The bytes of those batches, in order."""
    found = b""
    for step in steps:
        ids, targets = data.batch(step, batch, tokens)
        assert ids.shape == targets.shape == (batch, tokens)
        assert ids.dtype == torch.int64
        assert torch.equal(ids[:, 1:], targets[:, :-1])
        found += bytes(torch.cat((ids, targets[:, -1:]), 1).flatten().tolist())
    return found


def test_batches_are_the_documents_end_to_end_and_nothing_is_opened_before_the_first(hub, tmp_path):
    data = stream(tmp_path / "none", shuffle_buffer=0)
    assert isinstance(data, Data)
    assert not hub.opened and not (tmp_path / "none").exists()
    assert read(data, range(6)) == stored(TEXTS)[: 6 * 32]
    ((name, options),) = hub.opened
    assert name == ("HuggingFaceFW/fineweb-edu", "sample-10BT")
    assert options == {"split": "train", "streaming": True}


def test_a_step_has_the_same_bytes_whichever_came_first(hub, tmp_path):
    forward, backward = stream(tmp_path / "a"), stream(tmp_path / "b")
    steps = range(8)
    there = [read(forward, [s]) for s in steps]
    assert there == [read(backward, [s]) for s in reversed(steps)][::-1]
    assert hub.shuffled == (1337, 1000)
    assert b"".join(there) != stored(TEXTS)[: 8 * 32], "the fake hub does not shuffle"
    assert [read(stream(tmp_path / "a", seed=7), [s]) for s in steps] != there
    assert len(list((tmp_path / "a").iterdir())) == 2, "each seed has a cache of its own"


def test_what_has_arrived_is_read_without_the_network(hub, tmp_path, monkeypatch):
    first = read(stream(tmp_path), range(5))
    rows = hub.rows
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    again = stream(tmp_path)
    assert read(again, range(5)) == first
    assert hub.rows == rows
    message = r"HF_HUB_OFFLINE is set; \d+ bytes of it are in .*; unset .*, .*text\(path"
    with pytest.raises(NoText, match=message):
        again.batch(50, 2, 15)


def test_a_run_goes_on_where_the_cache_ends(hub, tmp_path):
    whole = read(stream(tmp_path / "whole"), range(40))
    assert read(stream(tmp_path / "parts"), range(10)) == whole[: 10 * 32]
    documents = stream(tmp_path / "parts").record()["documents"]
    hub.skipped.clear()
    assert read(stream(tmp_path / "parts"), range(40)) == whole
    assert hub.skipped == [documents]
    # what a killed process left half is cut off
    (file,) = (tmp_path / "parts").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert read(stream(tmp_path / "parts"), range(40)) == whole


def test_failures_are_retried_with_ever_longer_waits(hub, slept, tmp_path):
    expected = read(stream(tmp_path / "calm"), range(20))
    hub.rows = 0
    hub.refusals = [OSError("no route"), OSError("no route")]
    hub.failures = {7: ConnectionError("reset"), 20: ValueError("half a gzip block")}
    data = stream(tmp_path / "rough")
    assert read(data, range(20)) == expected
    assert slept == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, FIRST_WAIT_S, FIRST_WAIT_S]
    assert data.waited_s == sum(slept) == data.record()["waited_s"]
    assert hub.skipped[-2:] == [6, 18]  # documents that had come, by row and without the failed


def test_how_fast_text_came_is_measured_and_the_cache_counts_for_nothing(
    hub, tmp_path, monkeypatch
):
    data = stream(tmp_path, shuffle_buffer=0)
    ticks = iter(range(1000))
    with monkeypatch.context() as patched:  # each document takes half a second
        patched.setattr(streaming.time, "perf_counter", lambda: 0.5 * next(ticks))
        read(data, range(4))
    fetch, documents = data.record()["fetch"], data.record()["documents"]
    assert documents > 2
    assert fetch["s"] == pytest.approx(0.5 * documents)
    assert fetch["bytes"] == len(stored(TEXTS[:documents])) - documents  # without the ends
    assert fetch["mib_per_s"] == pytest.approx(fetch["bytes"] / 2**20 / fetch["s"])
    assert fetch["p50_document_ms"] == fetch["p95_document_ms"] == fetch["max_document_ms"] == 500
    again = stream(tmp_path, shuffle_buffer=0)
    read(again, range(4))
    assert again.record()["fetch"] == {"bytes": 0, "s": 0.0}


def test_what_never_works_ends_with_the_last_error_and_a_remedy(hub, slept, tmp_path):
    hub.refusals = [OSError("no route")] * 9
    data = stream(tmp_path, retries=3)
    message = (
        r"fineweb-edu/sample-10BT/train: 3 attempts failed, the last with OSError: no route; "
        r"0 bytes of it are in .*; mind the network and HF_TOKEN, .* data.text\(path=...\)"
    )
    with pytest.raises(NoText, match=message):
        data.batch(0, 2, 15)
    assert slept == [FIRST_WAIT_S, 2 * FIRST_WAIT_S]
    hub.refusals.clear()
    assert read(data, [0])  # and the next step may try again


def test_without_datasets_the_message_says_what_to_install(hub, slept, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    data = stream(tmp_path)
    with pytest.raises(NoText, match=r"not installed; pip install datasets, or .*text\(path=...\)"):
        data.batch(0, 1, 4)
    assert not slept  # no retry would help


def test_steps_past_the_end_are_refused(hub, tmp_path):
    size = len(stored(TEXTS))
    with pytest.raises(ValueError, match=rf"has {size} bytes, and this batch would end at byte"):
        stream(tmp_path, shuffle_buffer=0).batch(10**4, 2, 15)


def fill(folder, start):
    module = types.ModuleType("datasets")
    module.load_dataset = Hub().load_dataset
    sys.modules["datasets"] = module
    data = stream(folder)
    start.wait()
    for step in range(60):
        data.batch(step, 2, 15)


@pytest.mark.processes
def test_processes_may_share_a_cache(hub, tmp_path):
    context = get_context("fork")
    start = context.Barrier(2)
    both = [context.Process(target=fill, args=(tmp_path / "both", start)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(30)
        assert process.exitcode == 0
    expected = read(stream(tmp_path / "one"), range(60))
    assert read(stream(tmp_path / "both"), range(60)) == expected
    files = [next(iter((tmp_path / name).iterdir())).read_bytes() for name in ("one", "both")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("name", "value", "least"), [("retries", 0, 1), ("shuffle_buffer", -1, 0), ("seed", -1, 0)]
)
def test_an_illegal_option_is_refused(tmp_path, name, value, least):
    with pytest.raises(ValueError, match=f"{name}={value} must be at least {least}"):
        Stream(cache=tmp_path, **{name: value})


def test_only_fineweb_edu_has_a_subset_by_default(tmp_path, monkeypatch):
    assert streaming.stream(seed=3) == Stream(subset="sample-10BT", seed=3)
    assert streaming.stream("own/text", cache=tmp_path).name == "own/text/train"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Stream().cache == tmp_path / "nsa", "not in the user's cache"
