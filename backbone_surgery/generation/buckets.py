"""Buckets: round sizes up to a few values, so that few programs are compiled."""


def bucket(size: int, smallest: int = 1, steps: int = 2) -> int:
    """Round a size up to one of few: so many `steps` from a power of two to the next.

    The sequence is 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ...: at most a third of a bucket is unused.
    In four steps it is ..., 16, 20, 24, 28, 32, 40, ..., and at most a fifth.

    Examples:
        >>> [bucket(n) for n in (1, 5, 6, 9, 100)]
        [1, 6, 6, 12, 128]
        >>> bucket(5, smallest=16), bucket(33, steps=4)
        (16, 40)
    """
    size = max(size, smallest)
    power = 1 << (size - 1).bit_length()
    step = max(power // (2 * steps), 1)
    return -(-size // step) * step


def next_length(length: int, last: int) -> int:
    """Return the next length of a cache that is full: twice as long, or the last one.

    Examples:
        >>> next_length(256, 384), next_length(256, 1024)
        (384, 512)
    """
    return min(2 * length, last)
