"""A stand-in for `child.train` of a soak whose process somebody ends."""

import os
import signal

from workbook.rooms.soak import child

KILLED_AFTER = 2 * child.CHUNK + 5  # steps


def killed(spec):
    """Trains, and is gone in the middle of a chunk, as by the kernel or a colleague."""

    class Doomed(child.Samples):
        def on_step(self, step, loss):
            super().on_step(step, loss)
            if step == KILLED_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)

    child.Samples = Doomed
    return child.train(spec)
