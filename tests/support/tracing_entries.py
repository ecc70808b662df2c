"""Ranks of a trace of which one does not end as it should, in the trial called "ddp"."""

import os
import time

from nsa.experiments.tracing import child as tracing_child

plain = tracing_child.trace_one


def raise_on_rank_1(spec):
    def trace_one(setup, trial, here, place=None):
        if trial.name == "ddp" and here.rank == 1:
            raise ValueError("the planted mistake")
        return plain(setup, trial, here, place)

    tracing_child.trace_one = trace_one
    return tracing_child.run(spec)


def stay_away_on_rank_0(spec):
    def trace_one(setup, trial, here, place=None):
        if trial.name == "ddp" and here.rank == 0:
            time.sleep(300)
        return plain(setup, trial, here, place)

    tracing_child.trace_one = trace_one
    return tracing_child.run(spec)


def never_begin(spec):
    if os.environ["RANK"] == "1":
        raise ValueError("no meeting today")
    time.sleep(300)
