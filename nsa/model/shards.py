"""Text that every machine with Python has: the sources of its installed packages.

`build` writes two files of bytes, train.bin and held-out.bin, and manifest.json beside them. A
package is one document and lies whole in one of the two, by a hash of its name, so that another
version or another machine holds out the same packages. A file whose bytes occur twice (vendored
copies, licences) is written once, so that nothing held out is trained on.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from nsa.model.data import Text, text
from nsa.spelling import choice

SPLITS = ("train", "held-out")
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
LARGEST = 1 << 20  # bytes of a file; larger ones are tables, not text
HELD_OUT = 0.1  # fraction of packages
SALT = 1585  # with it torch and the largest that come with it are trained on, networkx is held out
END = b"\0"  # between files; UTF-8 text has no other use for it
FORMAT = "nsa text shards 1"


@dataclass(frozen=True)
class Shards:
    """Text shards in `folder`, and the manifest of what is in them: {"format", "fraction" of
    packages held out, "sha256" and "bytes" by split, "packages": [name, version, split, files,
    bytes] of each}."""

    folder: Path
    manifest: dict[str, Any]

    def text(self, split: str, seed: int = 1337) -> Text:
        """The bytes of "train" or "held-out", as `nsa.model.data.text` reads them."""
        choice("split", split, SPLITS)
        return text(self.folder / f"{split}.bin", seed=seed)

    def record(self) -> dict[str, Any]:
        """The manifest without its packages, of which the versions' hash is left."""
        listed = json.dumps(self.manifest["packages"]).encode()
        short = {name: x for name, x in self.manifest.items() if name != "packages"}
        return short | {"packages_sha256": hashlib.sha256(listed).hexdigest()}


def held_out(name: str, fraction: float = HELD_OUT) -> bool:
    """Return True if the package of this name is held out, whatever its version."""
    digest = hashlib.sha256(f"{SALT} {name.lower().replace('_', '-')}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def build(
    folder: str | os.PathLike,
    least: int,
    path: Sequence[str] | None = None,
    max_bytes: int | None = None,
    fraction: float = HELD_OUT,
) -> Shards:
    """Write the shards of the packages on `path` (by default this Python's) into `folder`.

    Packages are in the order of their names, a package's files in that of their paths; those of
    which pip keeps no list of files are passed over. `max_bytes` limits what is trained on.

    Raises ValueError if either split has fewer than `least` bytes: install more packages from
    source, or ask for fewer tokens.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    known = distributions() if path is None else distributions(path=list(path))
    named = {one.metadata["Name"]: one for one in known if one.metadata["Name"]}
    seen: set[bytes] = set()
    packages, sums = [], {split: hashlib.sha256() for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    # Names of this process's own, as several may build the same shards at once.
    parts = {split: folder / f".{split}.{os.getpid()}.part" for split in SPLITS}
    with parts["train"].open("wb") as train, parts["held-out"].open("wb") as other:
        for name in sorted(named, key=str.lower):
            split = SPLITS[held_out(name, fraction)]
            room = None if max_bytes is None or split != "train" else max_bytes - sizes[split]
            files = _files(named[name], seen, room)
            if not files:
                continue
            whole = END.join(files) + END
            (train if split == "train" else other).write(whole)
            sums[split].update(whole)
            sizes[split] += len(whole)
            packages.append([name, named[name].version, split, len(files), len(whole)])
    short = [f"{split} {sizes[split]}" for split in SPLITS if sizes[split] < least]
    if short:
        for part in parts.values():
            part.unlink()
        raise ValueError(
            f"the text of {len(named)} installed packages has too few bytes ({', '.join(short)}; "
            f"at least {least} are needed); install packages with much source, such as sympy or "
            "botocore, or ask for fewer tokens"
        )
    digests = {split: sums[split].hexdigest() for split in SPLITS}
    manifest = {"format": FORMAT, "fraction": fraction, "sha256": digests, "bytes": sizes}
    manifest["packages"] = packages
    for split, part in parts.items():
        os.replace(part, folder / f"{split}.bin")
    # Last, and whole, so that a folder with a manifest is complete.
    write(folder / "manifest.json", json.dumps(manifest).encode())
    return Shards(folder, manifest)


def write(file: Path, content: bytes) -> None:
    """Write the file atomically."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    part.write_bytes(content)
    os.replace(part, file)


def opened(folder: str | os.PathLike) -> Shards:
    """Open the shards in `folder`, and check that they are those of the manifest.

    Raises ValueError if there are none, or their bytes are others.
    """
    folder = Path(folder)
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no text shards ({error}); nsa.model.shards.build writes them"
        ) from error
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{folder} holds {manifest.get('format')!r}, this library reads {FORMAT}")
    for split in SPLITS:
        with (folder / f"{split}.bin").open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != manifest["sha256"][split]:
            raise ValueError(
                f"{folder}/{split}.bin is not what its manifest says (sha256 {found[:12]}, not "
                f"{manifest['sha256'][split][:12]}); remove the folder and build it again"
            )
    return Shards(folder, manifest)


def _files(package: Distribution, seen: set[bytes], room: int | None) -> list[bytes]:
    """Texts of a package's files that are not in `seen`, to which they are added."""
    found, left = [], float("inf") if room is None else room
    if left <= 0:
        return []
    for file in sorted(package.files or (), key=str):
        if file.suffix not in SUFFIXES:
            continue
        place = Path(str(file.locate()))
        try:
            if not place.is_file() or place.stat().st_size > LARGEST:
                continue
            content = place.read_bytes().replace(END, b" ")
            content.decode()
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(content).digest()
        if content and digest not in seen and len(content) < left:
            seen.add(digest)
            left -= len(content) + 1
            found.append(content)
    return found
