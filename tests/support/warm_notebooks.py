"""A plugin of pytest under which nbval's kernels, and what they start, are forks, as in the tests.

`pytest -p warm_notebooks --nbval ...` with this folder on PYTHONPATH. With a GPU all starts are
real.
"""

import os
import sys

from warm_children import WARM

if sys.platform == "linux" and not os.path.exists("/dev/nvidiactl"):
    WARM.install()
