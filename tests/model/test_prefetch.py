import threading
import time

import pytest
import torch
from observed import trainer

from nsa.model.data import synthetic
from nsa.model.prefetch import Prefetch
from nsa.model.train import Data


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
def test_batches_are_those_of_the_data_in_any_order(steps):
    data = synthetic()
    with Prefetch(data) as ahead:
        assert isinstance(ahead, Data)
        for step in steps:
            assert equal(ahead.batch(step, 2, 9), data.batch(step, 2, 9))


def test_sizes_may_change_between_steps():
    data = synthetic()
    with Prefetch(data) as ahead:
        for step, batch, tokens in ((0, 2, 9), (1, 3, 9), (2, 3, 5), (3, 3, 5)):
            assert equal(ahead.batch(step, batch, tokens), data.batch(step, batch, tokens))


def test_it_draws_so_many_ahead_and_no_more():
    slow = Slow()
    with Prefetch(slow, depth=3) as ahead:
        ahead.batch(0, 1, 4)
        deadline = time.monotonic() + 5
        while len(slow.drawn) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        # Three in the queue, and one in the thread's hands.
        assert slow.drawn == [0, 1, 2, 3, 4]
        assert slow.threads == {"nsa-prefetch"}


def test_what_a_step_waited_is_measured():
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


def test_close_ends_the_thread_and_may_be_called_twice():
    ahead = Prefetch(Slow(), depth=1)
    ahead.batch(0, 1, 4)
    assert len(threads()) == 1
    ahead.close()
    assert not threads()
    ahead.close()
    with pytest.raises(ValueError, match="step 1: this Prefetch was closed"):
        ahead.batch(1, 1, 4)


def test_a_prefetch_that_is_dropped_takes_its_thread_with_it():
    ahead = Prefetch(Slow(), depth=1)
    ahead.batch(0, 1, 4)
    del ahead
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_bad_sizes_are_refused():
    with Prefetch(synthetic()) as ahead, pytest.raises(ValueError, match="batch=0"):
        ahead.batch(0, 0, 4)
    with pytest.raises(ValueError, match="depth=0 must be at least 1"):
        Prefetch(synthetic(), depth=0)


def test_training_is_bit_equal_with_and_without():
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
