"""Write a text of 20,000 words, some of them far more often than others. The argument is the seed."""

import random
import sys

SYLLABLES = ["ba", "do", "ki", "lu", "ma", "ne", "po", "ra", "si", "tu"]
source = random.Random(int(sys.argv[1]))
words = ["".join(random.Random(number).choices(SYLLABLES, k=2 + number % 3)) for number in range(500)]
weights = [1 / (rank + 1) for rank in range(len(words))]
for _ in range(2000):
    print(*source.choices(words, weights, k=10))
