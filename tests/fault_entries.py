"""What tests run of planted faults in processes of their own."""

from planted import made

from nsa.lab.faults import chosen
from nsa.lab.ranks.rank_child import standing


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
