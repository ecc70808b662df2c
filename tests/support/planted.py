"""What tests use to run planted faults without a supervisor."""

import importlib

from nsa.experiments.selfcheck.faults.registry import chosen
from nsa.lab.process.child import standing


class Told:
    """A progress that keeps what it is told."""

    def __init__(self):
        self.phases, self.events, self.collectives = [], 0, 0

    def step(self, number):
        pass

    def phase(self, name):
        self.phases.append(name)

    def watch(self, model):
        pass

    def backward(self, loss, **options):
        loss.backward(**options)

    def event(self):
        self.events += 1

    def collective(self):
        self.collectives += 1


def made(fault, told=None, settings=None):
    """The fault's subject, in this process."""
    module, _, name = fault.subject.partition(":")
    make = getattr(importlib.import_module(module), name)
    return make(fault.settings if settings is None else settings, told or Told())


def steps(spec):
    """In a process of its own: the steps of the fault of that name; {"losses"}."""
    (fault,) = chosen([spec["name"]])
    subject = made(fault)
    losses = []
    for step in range(fault.steps):
        standing(f"step {step}")
        losses.append(float(subject.step(step)))
    if hasattr(subject, "close"):
        subject.close()
    return {"losses": losses}
