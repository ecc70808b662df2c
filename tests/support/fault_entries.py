"""What tests run of planted faults in processes of their own."""

from planted import made

from nsa.experiments.selfcheck.faults.registry import chosen
from nsa.lab.process.rank_child import standing


def run(spec):
    """The steps of the fault of that name; {"losses"}."""
    (fault,) = chosen([spec["name"]])
    subject = made(fault)
    losses = []
    for step in range(fault.steps):
        standing(f"step {step}")
        losses.append(float(subject.step(step)))
    if hasattr(subject, "close"):
        subject.close()
    return {"losses": losses}
