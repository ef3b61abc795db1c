"""Count the words of a file: one line for each word, with its number."""

import collections
import sys

with open(sys.argv[1], encoding="ascii") as text:
    counts = collections.Counter(text.read().split())
for word, number in sorted(counts.items()):
    print(word, number)
