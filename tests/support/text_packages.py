"""Installed packages of a few files, whose text becomes shards."""

from pathlib import Path

from nsa.model import shards

TRAINED, HELD_OUT = "beta", "alpha"  # by the hash of the name, at a fraction of one half


def package(site: Path, name: str, files: dict[str, bytes], version: str = "1.0") -> None:
    """Write a package as pip installs it, with its list of files."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))


def words(count: int, seed: int) -> bytes:
    """Text of `count` lines that differ, with a pattern that a model can learn."""
    line = b"def name_%d(x):\n    return x + %d\n"
    return b"".join(line % (i * 7 + seed, i) for i in range(count))


def small_shards(folder: Path, lines: int = 400) -> shards.Shards:
    """Shards of two packages, one of which is held out."""
    site = folder / "site"
    package(site, TRAINED, {"beta/b.py": words(lines, 0)})
    package(site, HELD_OUT, {"alpha/a.py": words(lines, 3)})
    return shards.build(folder / "text", 4096, path=[str(site)], fraction=0.5)
