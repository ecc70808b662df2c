"""`python -m nsa.experiments.training.rank FOLDER`: one rank of the job in FOLDER."""

import sys
from pathlib import Path

from nsa.experiments.training.run import supervised_rank

if __name__ == "__main__":
    supervised_rank(Path(sys.argv[1]))
