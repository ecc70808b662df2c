"""Scale of the quiet times of these programs, and reading of their option."""

import argparse
import os

SCALE = float(os.environ.get("HANGS_SCALE", 1))  # of the quiet times


def option(name, *values):
    """Value given for an option, "--by": one of several texts, or any number; else the first."""
    parser = argparse.ArgumentParser()
    choices = values if len(values) > 1 else None
    parser.add_argument(
        name, dest="value", type=type(values[0]), choices=choices, default=values[0]
    )
    return parser.parse_args().value
