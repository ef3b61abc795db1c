"""Read the results of a study and print them, the best first."""

import glob
import json
import sys


def main():
    """Print a table of all results in a folder."""
    results = []
    for name in glob.glob(f"{sys.argv[1]}/*.json"):
        with open(name, encoding="ascii") as file:
            results.append(json.load(file))
    for result in sorted(results, key=lambda result: result["rms"]):
        print(f"degree {result['degree']}  rate {result['rate']:<5}  rms {result['rms']:.4f}")


if __name__ == "__main__":
    main()
