"""Which Python a notebook's kernel runs on: the one that runs us, with the package that runs it."""

import sys

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

# An idle kernel notices a vanished parent by itself; one stuck in C, holding the GIL, stays for
# ever unless the system ends it. The folder that comes first on sys.path could shadow modules.
START = """\
import sys
del sys.path[0]
from whyhung.process.family import die_with_parent
die_with_parent()
from ipykernel import kernelapp
kernelapp.launch_new_instance()
"""


class OwnInterpreter(KernelSpecManager):
    """Every kernel runs on the interpreter that runs us, whatever kernel specs are installed.

    What starts one gives it `whyhung.process.family.environment`, or it does not find this package.
    """

    def get_kernel_spec(self, kernel_name):
        argv = [sys.executable, "-Xfrozen_modules=off", "-c", START, "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def kernel_manager(config=None) -> AsyncKernelManager:
    """A manager, not started, of a kernel on our own interpreter."""
    return AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=OwnInterpreter(), config=config
    )
