# due: healthy; quiet: 25; runs: --how sched | --how event; set: late
# Nothing is to be done for 25 s: a scheduled evaluation, or an event with a timeout that nobody
# sets.
import sched
import threading

import torch
from _shared import SCALE, option


def evaluate(model):
    return model(torch.randn(64, 8)).mean().item()


def main():
    how = option("--how", "sched", "event")
    model, stop = torch.nn.Linear(8, 1), threading.Event()
    evaluate(model)
    print("quiet", flush=True)
    if how == "event":
        stop.wait(timeout=26 * SCALE)
        evaluate(model)
    else:
        plan = sched.scheduler()
        plan.enter(26 * SCALE, 1, evaluate, (model,))
        plan.run()
    print("over", flush=True)


if __name__ == "__main__":
    main()
