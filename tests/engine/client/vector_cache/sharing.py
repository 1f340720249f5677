"""A process that reads and writes a folder beside others: `sharing.py FOLDER SEED ROUNDS BYTES`.

Every process can compute the row of a key, and checks the rows that it reads. Prints the number of found, wrong and
evicted rows.
"""

import random
import sys
from hashlib import blake2b
from pathlib import Path

from penstock.engine.client.vector_cache.disk import DiskTier

NUM_KEYS = 6_000


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "big"), digest_size=32).digest()


def row_of(number: int) -> bytes:
    """Returns 1,500 bytes; 5,000 bytes for every tenth key."""
    return b"row " + key_of(number) * (157 if number % 10 == 0 else 47)


def main(folder: str, seed: str, num_rounds: str, max_bytes: str) -> None:
    chance = random.Random(int(seed))
    tier = DiskTier(Path(folder), int(max_bytes))
    found = wrong = 0
    for _ in range(int(num_rounds)):
        numbers = [chance.randrange(NUM_KEYS) for _ in range(100)]
        rows = tier.read([key_of(number) for number in numbers])
        found += sum(row is not None for row in rows)
        wrong += sum(row not in (None, row_of(number)) for number, row in zip(numbers, rows, strict=True))
        tier.write([(key_of(n), row_of(n)) for n, row in zip(numbers, rows, strict=True) if row is None])
    print(found, wrong + tier.num_damaged, tier.num_evicted)
    tier.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
