# due: HANG:pipe or STALLED:pipe; line: step_all, simulate; within: 60; set: first
# A vector of simulators: after a reset one waits for a command and the trainer for its
# observation (both ends in recv).
import multiprocessing
import sys
import threading
import time

import torch

multiprocessing.set_start_method("fork")


def simulate(pipe, seed):
    state = seed
    while True:
        command, action = pipe.recv()
        state = (state * 31 + action) % 1009
        if command == "reset":
            state = seed
        if command == "step":  # forgets to answer a reset
            pipe.send(state)


def step_all(pipes, actions, command="step"):
    for pipe, action in zip(pipes, actions, strict=True):
        pipe.send((command, action))
    return torch.tensor([pipe.recv() for pipe in pipes], dtype=torch.float32)


def show_progress(done):
    while True:
        sys.stderr.write(f"\rsteps: {len(done)}")
        time.sleep(0.5)


def main():
    pipes, done = [], []
    threading.Thread(target=show_progress, args=(done,), daemon=True).start()
    for seed in range(2):
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=simulate, args=(theirs, seed), daemon=True).start()
        pipes.append(ours)
    policy = torch.nn.Linear(2, 2)
    states = torch.zeros(2)
    for step in range(2000):
        actions = policy(states / 1009).abs().mul(10).long().tolist()
        if step == 1500:
            print("fault", flush=True)
            states = step_all(pipes, actions, "reset")
        states = step_all(pipes, actions)
        done.append(step)


if __name__ == "__main__":
    main()
