"""Print the mean of the numbers in the files of a folder."""

import pathlib
import sys


def main():
    """Read them all, and print how many there are and their mean."""
    numbers = [float(path.read_text(encoding="ascii")) for path in pathlib.Path(sys.argv[1]).iterdir()]
    print(f"{len(numbers)} estimates, mean {sum(numbers) / len(numbers):.3f}")


if __name__ == "__main__":
    main()
