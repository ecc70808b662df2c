"""Arguments and environment of this process as /proc shows them, which a fork may change."""

import ctypes
import functools
import os
import struct

_prctl = ctypes.CDLL(None, use_errno=True).prctl
_MM, _MM_MAP = 35, 14  # of prctl


@functools.cache
def places() -> list[int]:
    """Ends of this program's arguments and environment in memory, before any `rewrite`."""
    with open("/proc/self/stat") as file:
        return [int(field) for field in file.read().rpartition(")")[2].split()[45:49]]


def rewrite(words: list[str], variables: list[str]) -> None:
    """Puts both where /proc/self/cmdline and /proc/self/environ are read from."""
    start, end, env_start, env_end = places()
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    texts = [b"".join(os.fsencode(text) + b"\0" for text in part) for part in (words, variables)]
    ends = []
    for text, begin, limit in zip(texts, (start, env_start), (end, env_end), strict=True):
        ctypes.memset(begin, 0, limit - begin)
        ctypes.memmove(begin, text, len(text))
        ends.append(begin + len(text))
    brk = ctypes.CDLL(None).sbrk
    brk.restype = ctypes.c_void_p
    # code, data, brk and stack as they are; then the two, no auxv, and the program as it is
    layout = [*map(int, (fields[23], fields[24], *fields[42:45])), brk(0), int(fields[25])]
    given = struct.pack("=12QII", *layout, start, ends[0], env_start, ends[1], 0, 0, 2**32 - 1)
    _prctl(_MM, _MM_MAP, given, len(given), 0)  # where it may not be set, NULs are at both ends
