"""Ranks of a trace of which one does not end as it should, in the trial called "ddp"."""

import os
import time

from workbook.rooms.tracing import child


def run_but(spec, rank, instead):
    plain = child.trace_one

    def trace_one(setup, trial, here, place=None):
        if trial.name == "ddp" and here.rank == rank:
            instead()
        return plain(setup, trial, here, place)

    child.trace_one = trace_one
    return child.run(spec)


def planted_mistake():
    raise ValueError("the planted mistake")


def raise_on_rank_1(spec):
    return run_but(spec, 1, planted_mistake)


def stay_away_on_rank_0(spec):
    return run_but(spec, 0, lambda: time.sleep(300))


def never_begin(spec):
    if os.environ["RANK"] == "1":
        raise ValueError("no meeting today")
    time.sleep(300)
