"""Train a small network on two moons, in pure Python, and survive being stopped.

A checkpoint is written after every fifth epoch, whole or not at all. A later run goes on from it. `--fail-at N` makes
the first try of a job end with an error after epoch N.
"""

import argparse
import json
import math
import os
import random
import signal
import sys

HIDDEN = 8
CHECKPOINT = "checkpoint.json"


def two_moons(number, seed):
    """Return points of two interleaved half circles, each with its label, 0 or 1."""
    source = random.Random(seed)
    points = []
    for index in range(number):
        angle = math.pi * source.random()
        label = index % 2
        x = math.cos(angle) if label == 0 else 1 - math.cos(angle)
        y = math.sin(angle) if label == 0 else 0.5 - math.sin(angle)
        points.append((x + source.gauss(0, 0.1), y + source.gauss(0, 0.1), label))
    return points


def new_weights(seed):
    """Return random weights: for each hidden unit two inputs, a bias and an output; last the output's bias."""
    source = random.Random(seed)
    return [[source.gauss(0, 1) for _ in range(4)] for _ in range(HIDDEN)], 0.0


def forward(units, bias, x, y):
    """Return the hidden values and the probability of label 1."""
    hidden = [math.tanh(a * x + b * y + c) for a, b, c, _ in units]
    score = bias + sum(unit[3] * value for unit, value in zip(units, hidden, strict=True))
    return hidden, 1 / (1 + math.exp(-max(-60.0, min(60.0, score))))


def epoch_of(units, bias, points, rate):
    """Do one epoch of gradient descent, point by point. Return the bias and the mean loss."""
    loss = 0.0
    for x, y, label in points:
        hidden, probability = forward(units, bias, x, y)
        loss -= math.log(max(probability if label else 1 - probability, 1e-12))
        error = probability - label
        for unit, value in zip(units, hidden, strict=True):
            back = error * unit[3] * (1 - value * value)
            unit[3] -= rate * error * value
            unit[0] -= rate * back * x
            unit[1] -= rate * back * y
            unit[2] -= rate * back
        bias -= rate * error
    return bias, loss / len(points)


def save(epoch, units, bias):
    """Write the checkpoint: whole, by a rename, so that no kill can leave half of one."""
    with open(CHECKPOINT + ".new", "w", encoding="ascii") as file:
        json.dump({"epoch": epoch, "units": units, "bias": bias}, file)
    os.replace(CHECKPOINT + ".new", CHECKPOINT)


def load():
    """Return the epoch, the units and the bias of the checkpoint, or those to begin with."""
    try:
        with open(CHECKPOINT, encoding="ascii") as file:
            saved = json.load(file)
    except FileNotFoundError:
        return 0, *new_weights(seed=2)
    return saved["epoch"], saved["units"], saved["bias"]


def main():
    """Train, and say how good it became."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--fail-at", type=int, default=0)
    options = parser.parse_args()
    attempt = int(os.environ.get("SPOOL_ATTEMPT", "1"))

    warned = []
    signal.signal(signal.SIGUSR1, lambda number, frame: warned.append(number))
    points = two_moons(200, seed=1)
    begun, units, bias = load()
    print(f"attempt {attempt} begins after epoch {begun}", flush=True)
    for epoch in range(begun + 1, options.epochs + 1):
        bias, loss = epoch_of(units, bias, points, options.rate)
        if epoch % 5 == 0 or warned:
            save(epoch, units, bias)
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)
        if warned:
            sys.exit(85)
        if epoch == options.fail_at and attempt == 1:
            sys.exit(f"epoch {epoch}: an error, on purpose")
    right = sum((forward(units, bias, x, y)[1] > 0.5) == bool(label) for x, y, label in two_moons(200, seed=3))
    print(f"right for {right} of 200 new points", flush=True)
    os.remove(CHECKPOINT)


if __name__ == "__main__":
    main()
