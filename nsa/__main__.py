"""Entry point of `python -m nsa`, the same as `nsa`."""

import sys

from nsa.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
