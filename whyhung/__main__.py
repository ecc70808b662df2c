import sys

from whyhung.cli import main

if __name__ == "__main__":
    sys.exit(main())
