"""Which branch of the attention an allocation is for, read off the functions that are running."""

import sys
from types import FrameType

import nsa.attention
from nsa.attention import api
from nsa.blocks import Span

HERE = nsa.attention.__path__[0].rpartition("attention")[0]  # the package's files, kernels included
# Functions of the selected branch alone: choosing the blocks, and attending to them.
SELECTED = {"select_blocks", "selected", "plan", "selected_forward"}


def running() -> str:
    """ " cmp", " slc" or " win", as the end of a module's name; "" outside all three.

    A backend that makes its branches one by one has the finished ones in `outputs`, and is making
    the next. Where all are one operator, its launchers tell, and the run of keys that they attend.
    """
    found = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not api.nsa_attention.__code__:
        code = frame.f_code
        if code.co_filename.startswith(HERE):
            if "outputs" in code.co_varnames:
                if (outputs := frame.f_locals.get("outputs")) is not None:
                    left = [b for b in frame.f_locals["inputs"].branches if b not in outputs]
                    return f" {left[0]}" if left else ""
            elif code.co_name in SELECTED:
                found = " slc"
            elif code.co_name == "compressed":
                found = found or " cmp"
            elif not found and isinstance(span := frame.f_locals.get("span"), Span):
                found = " cmp" if span.lookback is None else " win"
        frame = frame.f_back
    return found if frame is not None else ""
