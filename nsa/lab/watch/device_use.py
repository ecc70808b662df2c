"""How busy the GPUs are, asked by a thread, because asking takes longer than a sample may."""

from __future__ import annotations

import threading

from nsa.lab.process import preflight

EVERY_S = 1.0


class DeviceUse:
    """`with DeviceUse() as use: use.percent` is the busiest GPU's, None before it was told.

    only: the GPUs that count, as CUDA_VISIBLE_DEVICES names them; None: those of this process.

    A GPU counts as busy while any kernel runs, one that never ends as well.
    """

    def __init__(self, only: str | None = None) -> None:
        self._only = only
        self.percent: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="device use", daemon=True)

    def __enter__(self) -> DeviceUse:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        while True:
            told = preflight.numbers("utilization.gpu", self._only)
            self.percent = max(map(float, told), default=None)
            if self._stop.wait(EVERY_S):
                return
