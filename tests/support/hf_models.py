"""Models of transformers, made here and small: nothing is fetched."""

import torch
from tiny_models import tiny
from transformers.utils import logging

from nsa.hf import NSAConfig, NSAForCausalLM

logging.disable_progress_bar()


def assert_same_weights(one, other):
    """The state dicts of two models have the same names and bits."""
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def made(seed=0, *, pad=256, eos=None, **changes):
    """An NSAForCausalLM in fp64 whose logits differ enough that no two tokens tie. No prompt has
    the id of its padding, for generate would take that for padding."""
    torch.manual_seed(seed)
    config = NSAConfig.of(tiny(**changes), pad_token_id=pad, eos_token_id=eos)
    model = NSAForCausalLM(config).double().eval()
    with torch.no_grad():
        model.lm_head.weight *= 20
    return model
