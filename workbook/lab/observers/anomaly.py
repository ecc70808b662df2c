"""Line of the forward at whose backward autograd's anomaly mode stops.

Anomaly mode names the backward function that returned NaN in the error, and the line of its forward
in a warning that is easily lost. Here the error has both.
"""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_DETECTED = "Error detected in "
_FRAME = re.compile(r'  File "([^"]+)", line (\d+), in (.+)\n(?:    (.+)\n?)?')
_TORCH = os.path.dirname(torch.__file__)


@contextmanager
def named_anomalies() -> Iterator[None]:
    """Add a note to a step's RuntimeError under torch.autograd.set_detect_anomaly(True).

    The note has the last frame of the forward that is not in torch: file, line, function, code.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_DETECTED)
        show, told = warnings.showwarning, []

        def keep(message, *where, **more):
            if str(message).startswith(_DETECTED):
                told.append(str(message))
            show(message, *where, **more)

        warnings.showwarning = keep
        try:
            yield
        except RuntimeError as error:
            for line in filter(None, map(_made_at, told[:1])):
                error.add_note(line)
            raise


def _made_at(warning: str) -> str:
    """'the forward of SqrtBackward0: File "model.py", line 8, in norm: x.sqrt()'; "" if unknown."""
    frames = [frame for frame in _FRAME.findall(warning) if not frame[0].startswith(_TORCH)]
    if not frames:
        return ""
    file, line, name, code = frames[-1]
    what = warning.removeprefix(_DETECTED).split(". ")[0]
    where = f'the forward of {what}: File "{file}", line {line}, in {name}'
    return f"{where}: {code}" if code else where
