"""Entry point of `python -m workbook` and of `python -m nsa`, the same as the command `nsa`."""

import sys

from workbook.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
