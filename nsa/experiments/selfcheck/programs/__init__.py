"""Training programs as strangers write them: healthy ones, and ones that hang, crawl or fail.

As a trial's subject: "nsa.experiments.selfcheck.programs:make", settings program and form. As a
script: `python -m nsa.experiments.selfcheck.programs NAME --form 1`, under torchrun for two ranks.
"""

from nsa.experiments.selfcheck.programs.registry import PROGRAMS, Program, chosen, make

__all__ = ["PROGRAMS", "Program", "chosen", "make"]
