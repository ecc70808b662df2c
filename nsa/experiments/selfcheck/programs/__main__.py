"""Runs one program as its user would: a line for each step."""

import argparse

from nsa.experiments.selfcheck.programs import chosen, make


def main() -> None:
    """One program, to its end if it has one."""
    parser = argparse.ArgumentParser(prog="programs", description=main.__doc__)
    parser.add_argument("name")
    parser.add_argument("--form", type=int, default=0, help="which of its forms (0)")
    told = parser.parse_args()
    (program,) = chosen([told.name])
    run = make({"program": told.name, "form": told.form})
    for step in range(program.steps):
        print(f"step {step} loss {run.step(step):.4f}", flush=True)
    run.close()


if __name__ == "__main__":
    main()
