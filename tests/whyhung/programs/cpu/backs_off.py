# due: healthy; quiet: 30; runs: --pauses one | --pauses growing; set: first
# A download is refused, the client sleeps for 30 s in all and asks again (retry with back-off).
import time

from _shared import SCALE, option


class Hub:
    def __init__(self, refusals):
        self.refusals = refusals

    def get(self, name):
        self.refusals -= 1
        if self.refusals >= 0:
            raise ConnectionError("503: slow down")
        return name.encode() * 100


def download(hub, name, pauses):
    for pause in pauses:
        try:
            return hub.get(name)
        except ConnectionError:
            time.sleep(pause * SCALE)
    return hub.get(name)


def main():
    form = option("--pauses", "one", "growing")
    pauses = [30] if form == "one" else [2, 4, 8, 16]
    print("quiet", flush=True)
    data = download(Hub(len(pauses)), "weights.bin", pauses)
    print("over", flush=True)
    print(len(data), "bytes")


if __name__ == "__main__":
    main()
