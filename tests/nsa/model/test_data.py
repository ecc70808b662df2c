"""Data of the model: repeatable, stateless, and clear about what cannot be read."""

import os
import threading
import time
from itertools import combinations

import pytest
import torch
from observed import trainer
from processes import wait_until

from nsa.model.data import Data, Prefetch, spread_ms, synthetic, text


@pytest.fixture(params=[synthetic, text], ids=["synthetic", "text"])
def source(request):
    return request.param


def test_a_batch_is_int64_tokens_and_each_ones_successor(source):
    before = torch.get_rng_state()
    tokens, targets = source().batch(0, 3, 65)
    assert torch.equal(torch.get_rng_state(), before), "it draws from the global generator"
    assert tokens.shape == targets.shape == (3, 65)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.min() >= 0 and max(tokens.max(), targets.max()) < 256
    assert tokens.is_contiguous() and targets.is_contiguous()


def test_a_batch_depends_on_seed_and_step_alone(source):
    first, again = source(seed=1), source(seed=1)
    later = first.batch(7, 2, 32)[0]
    again.batch(0, 5, 9)
    torch.rand(3)
    assert torch.equal(again.batch(7, 2, 32)[0], later)
    seen = [source(seed=seed).batch(step, 2, 32)[0] for seed in (1, 2) for step in (0, 1)]
    assert not any(torch.equal(one, other) for one, other in combinations(seen, 2))


def test_synthetic_tokens_use_the_whole_vocabulary():
    tokens, _ = synthetic(vocab=5).batch(0, 4, 200)
    assert tokens.unique().tolist() == [0, 1, 2, 3, 4]


def test_the_standard_library_is_many_megabytes_of_text_without_what_was_installed_later():
    read = text()
    assert len(read.data) > 5e6
    assert (read.data < 128).float().mean() > 0.95
    parts = {part for file in read.files for part in file.parts}
    assert not parts & {"site-packages", "dist-packages", "__pycache__"}
    assert {file.suffix for file in read.files} == {".py"}
    assert "/" not in read.record()["name"], "it names a folder of this machine"


def test_the_tokens_are_the_files_bytes_binary_ones_too_from_the_first_to_the_last(tmp_path):
    file = tmp_path / "all"
    file.write_bytes(bytes(range(256)))
    tokens, targets = text(file).batch(3, 1, 255)
    assert tokens.tolist() == [list(range(255))]
    assert targets.tolist() == [list(range(1, 256))]
    file.write_bytes(b"abcd")
    tokens, _ = text(file).batch(0, 200, 1)
    assert {chr(token) for token in tokens.flatten()} == {"a", "b", "c"}


def test_a_folder_is_read_in_the_order_of_its_paths_late_and_up_to_max_bytes(tmp_path):
    named = {"b/2": b"fourth", "a": b"first", "b/1": b"third", "c": b"second"}
    for name in named:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"early")
    whole, cut = text(tmp_path), text(tmp_path, max_bytes=7)
    for name, content in named.items():  # nothing is read before the first batch
        (tmp_path / name).write_bytes(content)
    assert bytes(whole.data.tolist()) == b"firstsecondthirdfourth"
    assert bytes(cut.data.tolist()) == b"firstse"


def test_the_record_tells_whether_two_machines_read_the_same_bytes(tmp_path):
    for name in ("one", "same", "other"):
        (tmp_path / name).write_bytes(b"abc" if name != "other" else b"abd")
    one, same, other = (text(tmp_path / name).record() for name in ("one", "same", "other"))
    assert one["sha256"] == same["sha256"] != other["sha256"]
    assert (one["bytes"], one["name"]) == (3, str(tmp_path / "one"))


@pytest.mark.parametrize(
    "spoil",
    # a link to memory opens, but its first page is not there
    [os.mkfifo, lambda path: path.symlink_to("/proc/self/mem")],
    ids=["a pipe", "unreadable"],
)
def test_what_cannot_be_read_is_left_out_of_a_folder(tmp_path, spoil):
    spoil(tmp_path / "spoilt")
    (tmp_path / "file").write_bytes(b"ab")
    assert len(text(tmp_path).data) == 2


def empty_file(folder):
    (folder / "empty").touch()
    return folder / "empty"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: folder / "missing", "missing: got 0 bytes, there is no such"),
        (lambda folder: folder, "got 0 bytes, no file was found"),
        (lambda folder: "/dev/null", "/dev/null: got 0 bytes, no file was found"),
        (lambda folder: "/proc/self/mem", r"/proc/self/mem: got 0 bytes .*\(mem: .+\)"),
        (empty_file, "empty: got 0 bytes from 1 file"),
    ],
    ids=["missing", "empty folder", "no regular file", "unreadable", "empty file"],
)
def test_a_path_with_nothing_to_read_is_refused_by_name(tmp_path, make, expected):
    with pytest.raises(ValueError, match=expected) as caught:
        text(make(tmp_path)).batch(0, 1, 1)
    assert "; name a" in str(caught.value) or "; name one" in str(caught.value)


def test_text_shorter_than_a_passage_says_how_much_it_has_and_needs(tmp_path):
    file = tmp_path / "short"
    file.write_bytes(b"x" * 10)
    text(file).batch(0, 1, 9)
    with pytest.raises(ValueError, match=r"short: got 10 bytes, .*10 tokens.*need 11;.*at most 9"):
        text(file).batch(0, 1, 10)


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_sizes_below_one_are_refused(source, sizes):
    with pytest.raises(ValueError, match="needs step >= 0, batch >= 1 and tokens >= 1"):
        source().batch(*sizes)


def test_a_vocabulary_or_a_text_of_one_is_refused():
    with pytest.raises(ValueError, match="vocab=1"):
        synthetic(vocab=1)
    with pytest.raises(ValueError, match="max_bytes=1"):
        text(max_bytes=1)


def threads():
    return [t for t in threading.enumerate() if t.name == "nsa-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not threads()


class Slow:
    """Synthetic batches that take a while, and a record of which were drawn."""

    def __init__(self, seconds=0.0, fails_at=None):
        self.data, self.seconds, self.fails_at = synthetic(), seconds, fails_at
        self.drawn, self.threads = [], set()

    def batch(self, step, batch, tokens, device="cpu"):
        self.threads.add(threading.current_thread().name)
        if step == self.fails_at:
            self.fails_at = None
            raise OSError("disk gone")
        time.sleep(self.seconds)
        self.drawn.append(step)
        return self.data.batch(step, batch, tokens, device)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("steps", [range(5), range(3, 9), [0, 1, 7, 8, 2, 2, 3]], ids=str)
def test_batches_drawn_ahead_are_those_of_the_data_in_any_order_and_of_any_sizes(steps):
    data = synthetic()
    with Prefetch(data) as ahead:
        assert isinstance(ahead, Data)
        for step in steps:
            assert equal(ahead.batch(step, 2, 9), data.batch(step, 2, 9))
        for step, *sizes in ((0, 2, 9), (1, 3, 9), (2, 3, 5), (3, 3, 5)):
            assert equal(ahead.batch(step, *sizes), data.batch(step, *sizes))


def test_it_draws_so_many_ahead_and_no_more():
    slow = Slow()
    with Prefetch(slow, depth=3) as ahead:
        ahead.batch(0, 1, 4)
        wait_until(lambda: len(slow.drawn) == 5)
        time.sleep(0.05)
        # Three in the queue, and one in the thread's hands.
        assert slow.drawn == [0, 1, 2, 3, 4]
        assert slow.threads == {"nsa-prefetch"}


def test_what_a_step_waited_for_its_batch_is_measured():
    slow = Slow(seconds=0.05)
    with Prefetch(slow, depth=2) as ahead:
        ahead.batch(0, 1, 4)
        assert ahead.wait_s >= 0.05  # nobody could have drawn the first
        time.sleep(0.5)
        ahead.batch(1, 1, 4)
        assert ahead.wait_s < 0.05  # drawn while this step computed
        assert ahead.batches == 2
        assert 0.05 <= ahead.waited_s < 1
        record = ahead.record()["prefetch"]
        assert record["depth"] == 2
        assert record["mean_wait_ms"] == pytest.approx(1e3 * ahead.waited_s / 2)
        assert record["max_wait_ms"] == 1e3 * ahead.waits_s[0]


def test_the_spread_of_waits_is_by_quantiles():
    waits = [0.001] * 90 + [0.010] * 8 + [2.0] * 2
    assert spread_ms(waits) == {"p50": 1.0, "p95": pytest.approx(10.0), "max": 2000.0}
    assert spread_ms([]) == {}


def test_an_error_of_the_thread_comes_at_its_step_with_its_traceback():
    slow = Slow(fails_at=2)
    with Prefetch(slow) as ahead:
        ahead.batch(0, 1, 4)
        ahead.batch(1, 1, 4)
        with pytest.raises(OSError, match="disk gone") as caught:
            ahead.batch(2, 1, 4)
        assert caught.value.__notes__ == ["while the batch of step 2 was drawn ahead"]
        assert "Slow" in str(caught.traceback[-1].frame.f_locals["self"])
        assert not threads()
        assert equal(ahead.batch(2, 1, 4), slow.data.batch(2, 1, 4))  # and it can be tried again


def test_close_ends_the_thread_and_may_be_called_twice_and_dropping_it_does_too():
    ahead = Prefetch(Slow(), depth=1)
    ahead.batch(0, 1, 4)
    assert len(threads()) == 1
    ahead.close()
    assert not threads()
    ahead.close()
    with pytest.raises(ValueError, match="step 1: this Prefetch was closed"):
        ahead.batch(1, 1, 4)
    # and one that is dropped takes its thread with it
    slow = Slow()
    ahead = Prefetch(slow, depth=1)
    ahead.batch(0, 1, 4)
    wait_until(lambda: len(slow.drawn) == 3)  # one waits for room that nobody makes
    del ahead
    wait_until(lambda: not threads())


def test_bad_sizes_and_depths_are_refused_by_a_prefetch():
    with Prefetch(synthetic()) as ahead, pytest.raises(ValueError, match="batch=0"):
        ahead.batch(0, 0, 4)
    with pytest.raises(ValueError, match="depth=0 must be at least 1"):
        Prefetch(synthetic(), depth=0)


def test_training_is_bit_equal_with_a_prefetch_and_without():
    plain = trainer(data=synthetic(), tokens=48, seed=1).run(4)
    with Prefetch(synthetic()) as ahead:
        assert trainer(data=ahead, tokens=48, seed=1).run(4) == plain


@pytest.mark.gpu
def test_on_a_gpu_batches_come_pinned_and_are_not_pinned_twice():
    with Prefetch(synthetic()) as ahead:
        tokens, targets = ahead.batch(0, 4, 64)
        assert tokens.is_pinned() and targets.is_pinned()
        assert tokens[1:3].pin_memory().data_ptr() == tokens[1:3].data_ptr()
        on_gpu, _ = ahead.batch(1, 4, 64, "cuda")
        assert torch.equal(on_gpu.cpu(), synthetic().batch(1, 4, 64)[0])
