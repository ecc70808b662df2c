"""Trainings that cannot be are refused before anything runs, in the one description of them."""

import pytest

from workbook.lab.training import TrainingSpec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "cpu_tes"}, "the nearest is 'cpu_test'"),
        ({"backend": "gathr"}, "the nearest is 'gather'"),
        ({"attention": "sparse"}, "known are nsa, dense"),
        ({"attention": "dense"}, "none of dense attention's; known are auto, sdpa"),
        ({"tokens": 0}, "tokens=0 must be a whole number of at least 1"),
        ({"tokens": 64.0}, "tokens=64.0"),
        ({"batch": True}, "batch=True"),
        ({"layers": 0}, "layers=0"),
        ({"layers": "two"}, "'two'"),
        ({"precision": "int8"}, "int8"),
        ({"checkpoint": "0:9"}, "does not fit 2 layers"),
        ({"compile": "yes"}, "must be true or false"),
        ({"ranks": 0}, "ranks=0 must be a whole number of at least 1"),
        ({"ranks": 2}, "ranks=2 need parallel='ddp' or 'fsdp'"),
        ({"ranks": 2, "parallel": "ddp", "batch": 3}, "batch=3 cannot be split over 2 rank"),
        ({"device": "tpu"}, "known are cpu, cuda"),
        ({"data": "novel"}, "known are text, synthetic"),
        ({"changes": {"backend": "sdpa"}}, "which the cell itself has"),
        ({"changes": {"phy": "mlp"}}, "the nearest is 'phi'"),
        ({"changes": {"max_tokens": 32}}, "more than max_tokens=32"),
        ({"changes": {"vocab": 16}}, "256 byte values, vocab=16 is too few"),
        ({"changes": [1]}, "must be a mapping"),
    ],
)
def test_what_could_not_be_run_is_refused_with_what_would(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainingSpec(**{"preset": "cpu_test", "tokens": 64, "backend": "gather", **changes})
