"""What the tests of all kernels need."""

import pytest
from backend_calls import DEVICE
from interpreted import true_bfloat16


@pytest.fixture(autouse=True)
def bfloat16_as_on_a_gpu(monkeypatch):
    if DEVICE == "cpu":
        true_bfloat16(monkeypatch)
