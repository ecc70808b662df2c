"""torch.compile of growing lengths, torch.export of any length, and models without values."""

import pytest
import torch
from tiny_models import tiny, tokens
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

from nsa.attention.api import nsa_attention
from nsa.config import NSAConfig
from nsa.model.layer import NSAAttention
from nsa.model.llama import LanguageModel

LENGTHS = (64, 77, 100, 128, 200)  # on either side of the window, and of n blocks
SIZES = {"compress_block": 16, "compress_stride": 8, "select_block": 16, "window": 96}
CONFIG = NSAConfig(**SIZES, select_count=8)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def draw(length):
    generator = torch.Generator().manual_seed(length)
    shapes = (4, 8), (2, 8), (2, 8), (4, 3)
    return [torch.randn(2, length, *shape, generator=generator) for shape in shapes]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["auto", "gather", "sdpa", "masked"])
@pytest.mark.parametrize("marked", [False, True], ids=["found", "marked"])
def test_growing_lengths_make_two_graphs_and_one_if_they_are_marked(backend, marked):
    counter = CompileCounterWithBackend("eager")

    def plain(*given):
        return nsa_attention(*given, CONFIG, backend=backend)

    compiled = torch.compile(plain, backend=counter, fullgraph=True)
    for length in LENGTHS:
        given = draw(length)
        for x in given if marked else ():
            torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(compiled(*given), plain(*given), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == (1 if marked else 2)


def learned(model, given):
    """(o, gradients) of one call of a model on ids or on hidden states."""
    o = model(*given)
    o = o[1] if isinstance(o, tuple) else o.square().sum()
    return o, *torch.autograd.grad(o, list(model.parameters()), allow_unused=True)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["layer", "model"])
@pytest.mark.parametrize("phi", ["mean", "mlp"])
def test_a_layer_and_a_model_learn_in_two_graphs(kind, backend, phi):
    config = tiny(nsa=CONFIG, backend="auto", phi=phi)
    model = (LanguageModel if kind == "model" else NSAAttention)(config)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in LENGTHS:
        given = [torch.randn(2, length, 32)]
        given = [tokens(2, length), tokens(2, length, 1)] if kind == "model" else given
        plain, found = learned(model, given), learned(compiled, given)
        for want, got in zip(plain, found, strict=True):  # where none reaches, zeros may stand
            if want is not None:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 2


def test_inductor_takes_any_length_with_one_graph_that_was_marked():
    layer = NSAAttention(32, 4, 2, CONFIG)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for length in LENGTHS:
        x = torch.randn(2, length, 32)
        torch._dynamo.mark_dynamic(x, 1)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["auto", "gather"])
@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
@pytest.mark.parametrize("kind", ["layer", "model"])
def test_a_program_exported_at_one_length_runs_at_any_other(kind, phi, backend):
    config = tiny(nsa=CONFIG, backend=backend, phi=phi)
    model = (LanguageModel if kind == "model" else NSAAttention)(config).eval()

    def given(length):
        return tokens(2, length) if kind == "model" else torch.randn(2, length, 32)

    least = CONFIG.compress_block + CONFIG.compress_stride  # two compressed keys
    shapes = ({1: Dim("T", min=least, max=4096)},)
    program = export(model, (given(80),), dynamic_shapes=shapes).module()
    for length in (least, 33, 80, 127, 300):
        x = given(length)
        found, wanted = program(x), model(x)
        pairs = zip(found[:1], wanted[:1], strict=True) if kind == "model" else [(found, wanted)]
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


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
    given = [torch.empty(1, 60, *shape, dtype=dtype, device="meta") for shape in
             ((4, 8), (2, 8), (2, 6), (4, 3))]  # fmt: skip
    for device in ("cpu", "meta"):
        borders = torch.tensor([0, 20, 60], dtype=torch.int32).to(device)
        o = nsa_attention(*given, CONFIG, cu_seqlens=borders, backend=backend)
        assert (o.shape, o.dtype, o.is_meta) == ((1, 60, 4, 6), dtype, True)
