"""A file that appears whole or not at all."""

import os


def write(path: str | os.PathLike, text: str) -> None:
    """Writes `text`; who reads meanwhile finds what was there before."""
    unfinished = f"{os.fspath(path)}.{os.getpid()}.unfinished"
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(unfinished, path)
