"""Estimate pi by throwing darts, and write the estimate to a file of its own."""

import argparse
import pathlib
import random


def main():
    """Throw, count, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--darts", type=int, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()

    dart = random.Random(options.seed).random
    hits = sum(dart() ** 2 + dart() ** 2 < 1 for _ in range(options.darts))
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(f"{4 * hits / options.darts}\n", encoding="ascii")


if __name__ == "__main__":
    main()
