import pytest
import torch

from nsa.experiments.case_study.figures import BAND_US, TIMINGS
from nsa.experiments.case_study.loop import measure
from nsa.experiments.case_study.loop.measure import count, count_kernels
from nsa.lab.observers.graph import count_nodes


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Operations this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_nine_timings_lie_on_one_line():
    assert len(TIMINGS) == 9
    low, high = BAND_US
    assert all(low < timing.microseconds < high for timing in TIMINGS)


def test_layers_and_tokens_move_seconds_a_hundredfold_and_microseconds_hardly():
    seconds = [timing.seconds for timing in TIMINGS]
    each = [timing.microseconds for timing in TIMINGS]
    assert max(seconds) > 100 * min(seconds)
    assert max(each) < 1.5 * min(each)


def test_operations_of_forward_and_backward_are_counted_apart():
    x = torch.ones(3, requires_grad=True)
    found = count(lambda: (x * 2).sum())
    assert found.by_name["mul"] == 2  # one of each direction
    assert (found.forward, found.syncs, found.nodes) == (2, 0, 3)
    assert found.total == found.forward + found.backward
    assert count(lambda: x.sum() * float(x[0].item())).syncs == 1


def test_a_node_with_two_uses_is_one_node():
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    assert count_nodes([(y + y).sum()]) == 4
    assert count_nodes([torch.ones(())]) == 0


@pytest.mark.full
def test_the_loop_dispatches_by_the_token_and_masks_do_not():
    def counted(path, tokens):
        changes = {"path": path, "defects": ()}
        return measure.operations({"changes": changes, "tokens": tokens})["operations"]

    assert counted("loop", 32) > 1.8 * counted("loop", 16)
    assert counted("masked", 32) == counted("masked", 16)
    assert counted("loop", 32) > 10 * counted("masked", 32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_are_refused_without_a_gpu():
    with pytest.raises(ValueError, match="torch sees none"):
        count_kernels(lambda: None)


@pytest.mark.gpu
def test_kernels_are_counted_on_a_gpu():
    x = torch.ones(8, device="cuda")
    assert count_kernels(lambda: x * 2 + 1) == 2
