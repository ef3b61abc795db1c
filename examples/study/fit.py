"""One point of a parameter study: fit a polynomial to noisy data by gradient descent, and write down the error."""

import argparse
import json
import math
import os
import random


def main():
    """Fit, and write the result to a file of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--degree", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()

    source = random.Random(7)
    data = [(x / 50 - 1, math.sin(3 * (x / 50 - 1)) + source.gauss(0, 0.1)) for x in range(101)]
    train, test = data[::2], data[1::2]
    factors = [0.0] * (options.degree + 1)
    for _ in range(300):
        for x, y in train:
            error = sum(factor * x**power for power, factor in enumerate(factors)) - y
            factors = [factor - options.rate * error * x**power for power, factor in enumerate(factors)]
    miss = [sum(factor * x**power for power, factor in enumerate(factors)) - y for x, y in test]
    result = {"degree": options.degree, "rate": options.rate, "rms": math.sqrt(sum(m * m for m in miss) / len(miss))}
    with open(options.out, "w", encoding="ascii") as file:
        json.dump(result, file)
    print(result)
    if metadir := os.environ.get("SPOOL_METADIR"):  # `spool ls study --by degree` shows it
        with open(f"{metadir}/metrics", "w", encoding="ascii") as file:
            file.write(f"rms = {result['rms']:.4f}\n")


if __name__ == "__main__":
    main()
