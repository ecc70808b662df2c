# due: healthy; quiet: 25; runs: --how copy | --how tar; set: late
# Many small files are copied, or packed and unpacked, for 25 s.
import pathlib
import shutil
import tarfile
import time

from _shared import SCALE, option


def make(folder, count):
    folder.mkdir()
    for i in range(count):
        (folder / f"sample-{i}.txt").write_text(f"{i} " * 200)


def move(folder, how, number):
    target = folder.with_name(f"copy-{number}")
    if how == "copy":
        shutil.copytree(folder, target)
    else:
        with tarfile.open("samples.tar.gz", "w:gz") as packed:
            packed.add(folder)
        with tarfile.open("samples.tar.gz") as packed:
            packed.extractall(target, filter="data")
    shutil.rmtree(target)


def main():
    how = option("--how", "copy", "tar")
    folder = pathlib.Path("samples").resolve()
    make(folder, 2000)
    print("quiet", flush=True)
    end, number = time.monotonic() + 25 * SCALE, 0
    while time.monotonic() < end:
        move(folder, how, number)
        number += 1
    print("over", flush=True)
    print(number, "copies")


if __name__ == "__main__":
    main()
