"""Subjects of trials whose work nothing counts, or that ends never."""

import time

import torch


class Uncounted:
    """A forward without modules: autograd's nodes are made, and nobody sees one end."""

    def __init__(self, settings, progress):
        self.seconds = settings.get("seconds", 60)

    def step(self, i):
        y, end = torch.ones(16, requires_grad=True), time.monotonic() + self.seconds
        while i == 2 and time.monotonic() < end:
            y = (y * 1.0001).clamp(max=2.0)


class Endless:
    """Goes round for ever, and asks something each time, so that nothing proves it."""

    def __init__(self, settings, progress):
        self.numbers = [1, 2, 3]

    def step(self, i):
        while i == 2:
            self.numbers.sort()
