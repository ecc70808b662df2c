"""Conditions of the attention's tests."""

import pytest
from backend_calls import DEVICE
from torch.nn.attention import flex_attention


@pytest.fixture(autouse=True)
def flex_is_not_traced(monkeypatch):
    """Let flex_attention run its operator itself: on a CPU torch would trace it anew for each mask,
    in a second or more, to run it as it is. `test_backends.py` has it traced once."""
    if DEVICE == "cpu":
        monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
