"""Buckets: round sizes up to a few values, so that few programs are compiled."""


def bucket(size: int, smallest: int = 1) -> int:
    """Round a size up to a power of two, or to the middle between two of them.

    The sequence is 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ...: at most a third of a bucket is unused.

    Examples:
        >>> [bucket(n) for n in (1, 5, 6, 9, 100)]
        [1, 6, 6, 12, 128]
        >>> bucket(5, smallest=16)
        16
    """
    size = max(size, smallest)
    power = 1 << (size - 1).bit_length()
    middle = power * 3 // 4
    return middle if middle >= size and power >= 4 else power


def next_length(length: int, last: int) -> int:
    """Return the next length of a cache that is full: twice as long, or the last one.

    Examples:
        >>> next_length(256, 384), next_length(256, 1024)
        (384, 512)
    """
    return min(2 * length, last)
