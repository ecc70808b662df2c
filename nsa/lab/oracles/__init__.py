"""What must hold of a training that ends well: each oracle watches a trial and says ok or not."""

from nsa.lab.oracles.registry import ANEW, CHEAP, ORACLES, Watch, check, merge, names, watch

__all__ = ["ANEW", "CHEAP", "ORACLES", "Watch", "check", "merge", "names", "watch"]
