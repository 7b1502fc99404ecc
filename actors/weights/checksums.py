"""CRC-32 of weights: that of a whole tensor follows from those of its rows, wherever each was computed."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

# CRC-32's polynomial, bits reversed, as zlib has it.
_POLYNOMIAL = 0xEDB88320


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Bytes that were looked at."""

    num_bytes: int
    checksum: int
    """Their CRC-32."""


def checked(pieces: Iterable[NDArray[np.uint8]]) -> Checked:
    """Of pieces that follow each other: as of all of them in one."""
    num_bytes, checksum = 0, 0
    for piece in pieces:
        num_bytes, checksum = num_bytes + piece.nbytes, zlib.crc32(piece.data, checksum)
    return Checked(num_bytes=num_bytes, checksum=checksum)


def joined(parts: Iterable[Checked]) -> Checked:
    """What `checked` would say of parts that follow each other, of which the bytes are elsewhere.

    To append n bytes to what has a CRC is to put it through n zero bytes, which is linear over bits, and to add (xor)
    the CRC of what is appended (zlib's `crc32_combine`, by Mark Adler).
    """
    num_bytes, checksum = 0, 0
    for part in parts:
        checksum = _through_zeros(checksum, part.num_bytes) ^ part.checksum
        num_bytes += part.num_bytes
    return Checked(num_bytes=num_bytes, checksum=checksum)


def _through_zeros(checksum: int, num_bytes: int) -> int:
    power = 0
    while num_bytes >> power:
        if num_bytes >> power & 1:
            checksum = _times(_zeros(power), checksum)
        power += 1
    return checksum


@cache
def _zeros(power: int) -> Sequence[int]:
    """What 2^power zero bytes do to a CRC: a matrix of bits, a column for each bit."""
    if power >= 0:
        return _squared(_zeros(power - 1))
    # Half a byte: four times one bit, which shifts the register.
    one_bit = (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    return _squared(_squared(one_bit))


def _squared(matrix: Sequence[int]) -> Sequence[int]:
    return tuple(_times(matrix, column) for column in matrix)


def _times(matrix: Sequence[int], vector: int) -> int:
    product = 0
    for bit, column in enumerate(matrix):
        if vector >> bit & 1:
            product ^= column
    return product
