"""A stranger's subject whose steps an A/B times."""

import time

import torch

from whyhung.process.subject import Steps


def naps(settings, progress):
    """Steps that sleep for settings["nap_s"] and learn what they would without."""
    model = torch.nn.Linear(4, 4)

    def step(i):
        time.sleep(settings["nap_s"])
        loss = model(torch.full((2, 4), float(i))).pow(2).mean()
        loss.backward()
        return loss

    return Steps(step, model)
