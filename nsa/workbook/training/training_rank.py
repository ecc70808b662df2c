"""`python -m nsa.workbook.training.training_rank FOLDER`: one rank of the job in FOLDER."""

import sys
from pathlib import Path

from nsa.workbook.training.training_run import supervised_rank

if __name__ == "__main__":
    supervised_rank(Path(sys.argv[1]))
