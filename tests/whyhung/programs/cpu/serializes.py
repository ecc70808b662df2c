# due: healthy; quiet: 25; runs: --form pickle | --form json; set: first
# A large structure is written and read as pickle or JSON for 25 s.
import json
import pickle
import time

from _shared import SCALE, option


def rows(count):
    return [{"id": i, "text": f"document {i}", "scores": [i / 7, i / 11]} for i in range(count)]


def keep(data, form, path):
    mode = "b" if form == "pickle" else ""
    kind = pickle if form == "pickle" else json
    with open(path, "w" + mode) as file:
        kind.dump(data, file)
    with open(path, "r" + mode) as file:
        return kind.load(file)


def main():
    form = option("--form", "pickle", "json")
    data = rows(300_000)
    print("quiet", flush=True)
    end = time.monotonic() + 25 * SCALE
    while time.monotonic() < end:
        data = keep(data, form, "rows.data")
    print("over", flush=True)
    print(len(data), "rows")


if __name__ == "__main__":
    main()
