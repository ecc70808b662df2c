"""torch.compile of growing lengths, torch.export of any length, and models without values."""

from functools import cache

import pytest
import torch
from processes import told_by
from tiny_models import tiny, tokens
from traced_lengths import CASES, CONFIG

from nsa.attention.api import nsa_attention
from nsa.model.llama import LanguageModel

GRAPHS = {"calls": 2, "marked": 1, "steps": 2, "exported": 1}  # two: of one length, then of any


@cache
def found(*kinds: str) -> dict:
    """Graphs and errors of each kind's cases, from one process for all of them."""
    return told_by("traced_lengths.py", *kinds, interpreted=True)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("kind", GRAPHS)
def test_any_length_runs_by_few_graphs_and_as_it_does_without(kind):
    check(found(*GRAPHS)[kind], kind, GRAPHS[kind])


@pytest.mark.processes
@pytest.mark.long
def test_generated_code_is_of_few_graphs_too():
    check(found("generated")["generated"], "generated", 2)


def check(cases: dict, kind: str, graphs: int) -> None:
    assert len(cases) == len(CASES[kind])
    for name, case in cases.items():
        assert case["graphs"] == graphs and case["error"] < 1e-4, name


@pytest.mark.parametrize("backend", ["auto", "packed", "gather", "sdpa", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_on_meta_there_are_shapes_and_dtypes_and_gradients_of_them(backend, dtype):
    with torch.device("meta"):
        model = LanguageModel(tiny(backend=backend, phi="mlp")).to(dtype)
    ids = tokens(2).to("meta")
    logits, loss = model(ids, ids)
    assert (logits.shape, logits.dtype, logits.device.type) == ((2, 48, 256), dtype, "meta")
    loss.backward()
    for name, x in model.named_parameters():
        assert x.grad.shape == x.shape and x.grad.is_meta, name
    shapes = (4, 8), (2, 8), (2, 6), (4, 3)
    given = [torch.empty(1, 60, *shape, dtype=dtype, device="meta") for shape in shapes]
    for device in ("cpu", "meta"):
        borders = torch.tensor([0, 20, 60], dtype=torch.int32).to(device)
        o = nsa_attention(*given, CONFIG, cu_seqlens=borders, backend=backend)
        assert (o.shape, o.dtype, o.is_meta) == ((1, 60, 4, 6), dtype, True)
