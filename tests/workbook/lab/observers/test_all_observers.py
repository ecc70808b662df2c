"""All observers on one training run: nobody waits, nobody changes a number."""

import io

import pytest
from observed import no_sync, trainer
from tiny_models import TOKENS, tiny

from nsa.model.llama import LanguageModel
from workbook.lab.measure.counting import count_syncs
from workbook.lab.observers.arrival import GradientArrival
from workbook.lab.observers.attention_stats import AttentionStats
from workbook.lab.observers.beat import Heartbeat
from workbook.lab.observers.module_order import ModuleOrder
from workbook.lab.observers.phases import PhaseTimes
from workbook.lab.observers.trace import Ranges
from workbook.lab.observers.writers import CsvWriter


def watched(folder, device="cpu", **training):
    """A trainer with every observer, and the file that its losses go to."""
    model = LanguageModel(tiny())
    writer = CsvWriter(folder / "losses.csv")
    observers = [
        Heartbeat(io.StringIO(), every_s=0.05),
        GradientArrival(model),
        ModuleOrder(model),
        AttentionStats(model, every=2, writers=[writer]),
        PhaseTimes(device),
        Ranges(model, device),
        writer,
    ]
    return trainer(*observers, model=model, device=device, tokens=TOKENS, **training)


def test_all_together_leave_the_losses_as_they_are_and_no_hook_behind(tmp_path):
    made = watched(tmp_path)
    losses = made.run(4)
    made.close()
    for module in made.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in made.model.parameters())
    assert losses == trainer(tokens=TOKENS).run(4)
    text = (tmp_path / "losses.csv").read_text().splitlines()
    written = [float(row.rpartition(",")[2]) for row in text if ",loss," in row]
    assert written == losses


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_observer_waits_for_the_gpu(tmp_path, precision):
    made = watched(tmp_path, "cuda", precision=precision)
    made.run(2)
    with no_sync():
        for step in range(2, 6):
            made.step(step)
    made.close()
    assert len(made.observers[1].rows()) == len(list(made.model.parameters()))


@pytest.mark.gpu
def test_an_observed_step_makes_no_call_that_waits(tmp_path):
    made = watched(tmp_path, "cuda")
    assert count_syncs(lambda: made.step(made.steps_done), warm=4) == 0
    made.close()
