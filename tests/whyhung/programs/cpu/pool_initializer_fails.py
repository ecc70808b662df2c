# due: HANG or STALLED; line: open_model, score_all; within: 60; set: first
# Each worker of a pool fails in its initializer, the pool starts another, for ever (Pool hangs
# when initializer raises).
import multiprocessing
import os


def open_model(path):
    global model
    with open(path) as file:
        model = float(file.read())


def score(text):
    return len(text) * model


def score_all(texts, path):
    with multiprocessing.Pool(2, initializer=open_model, initargs=(path,)) as pool:
        return pool.map(score, texts)


def main():
    with open("model.txt", "w") as file:
        file.write("0.5")
    texts = [f"text {i}" for i in range(500)]
    print(sum(score_all(texts, "model.txt")), flush=True)
    os.remove("model.txt")
    print("fault", flush=True)
    print(sum(score_all(texts, "model.txt")), flush=True)


if __name__ == "__main__":
    main()
