"""A torch.nn.Module as a subject: driven where nothing has to be guessed, else told what to add."""

import sys
import types

import pytest
import torch
from torch import nn

from whyhung.process.subject import make


class Language(nn.Module):
    def __init__(self, width=8, vocabulary=11):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, idx, targets=None):
        logits = self.out(self.table(idx))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, image, scale):
        return self.layer(image) * scale


class Shown(Vision):
    @property
    def dummy_inputs(self):
        return {"image": torch.ones(4, 3), "scale": 2.0}


class Held(Vision):
    def example_inputs(self):
        return torch.ones(4, 3), 2.0


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("my_models")
    made.Language, made.Vision, made.Shown, made.Held = Language, Vision, Shown, Held
    made.instance = Language()
    made.build = lambda width=4: Language(width)
    made.ours = lambda settings, progress: Language(settings["width"])
    monkeypatch.setitem(sys.modules, "my_models", made)
    for kind in (Language, Vision, Shown, Held):
        monkeypatch.setattr(kind, "__module__", "my_models")
    return made


@pytest.mark.parametrize(
    ("name", "settings"),
    [("Language", {"width": 16}), ("instance", {}), ("build", {}), ("ours", {"width": 4}),
     ("Shown", {}), ("Held", {})],
)  # fmt: skip
def test_a_module_that_can_be_driven_trains(module, name, settings):
    subject = make(f"my_models:{name}", settings, None)
    losses = [float(subject.step(i)) for i in range(30)]
    assert losses[-1] < losses[0] and all(p.grad is not None for p in subject.model.parameters())
    if "width" in settings:
        assert subject.model.out.in_features == settings["width"]
    assert "had a step made for it" in subject.notes[0]


def test_one_that_cannot_be_driven_is_told_which_lines_to_add(module):
    with pytest.raises(ValueError, match="nothing\ntells what its forward") as error:
        make("my_models:Vision", {}, None)
    lines = str(error.value).split("\n\n", 1)[1]
    assert "Vision(...)" in lines and len(lines.strip().splitlines()) == 5
    # and they do, once they are filled in
    text = "\n".join(line[4:] for line in lines.splitlines())
    text = text.replace("Vision(...)", "Vision()").replace("model(inputs)", "model(inputs, 1.0)")
    exec(text.replace("(8, 16)", "(8, 3)"), given := {"torch": torch, "Vision": Vision})
    subject = given["make"]({}, None)
    subject.step(0)
    assert subject.model.layer.weight.grad is not None


def test_settings_that_do_not_suit_a_class_are_told_with_its_signature(module):
    with pytest.raises(ValueError, match=r"Language\(.*width=8.*depth=3: .*unexpected"):
        make("my_models:Language", {"depth": 3}, None)
