"""Start ipykernel so that it dies with the runner, also when it is stuck in C holding the GIL.

Run as a script by `nsa.workbook.interpreter`; an idle kernel notices a vanished parent by itself, a
stuck one stays for ever without this.
"""

import sys


def main() -> None:
    # a script's own folder comes first on sys.path, and would shadow modules by its file names
    del sys.path[0]
    from nsa.lab.process.family import die_with_parent

    die_with_parent()
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()


if __name__ == "__main__":
    main()
