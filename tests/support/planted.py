"""Helpers to run planted faults without a supervisor."""

import importlib

from whyhung.process.child import standing
from workbook.rooms.selfcheck.registry import chosen


class Told:
    """A progress that keeps which phases it is told."""

    def __init__(self):
        self.phases = []
        self.phase = self.phases.append

    def backward(self, loss):
        loss.backward()


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
