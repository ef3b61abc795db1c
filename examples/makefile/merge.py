"""Add up the counts of several files and print the words, the most frequent first."""

import collections
import sys

total = collections.Counter()
for name in sys.argv[1:]:
    with open(name, encoding="ascii") as counts:
        for line in counts:
            word, number = line.split()
            total[word] += int(number)
for word, number in total.most_common():
    print(f"{number:8} {word}")
