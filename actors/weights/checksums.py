"""CRC-32 checksums of weights: a tensor's checksum is combined from those of its shards."""

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
class Checksum:
    """Size and checksum of some bytes."""

    num_bytes: int
    checksum: int
    """Their CRC-32."""


def checksum_of(pieces: Iterable[NDArray[np.uint8]]) -> Checksum:
    """Return size and checksum of consecutive pieces, as if they were one."""
    num_bytes, checksum = 0, 0
    for piece in pieces:
        num_bytes, checksum = num_bytes + piece.nbytes, zlib.crc32(piece.data, checksum)
    return Checksum(num_bytes=num_bytes, checksum=checksum)


def combine_checksums(parts: Iterable[Checksum]) -> Checksum:
    """Combine the checksums of consecutive parts without their bytes, equal to `checksum_of` of all of them.

    Appending n bytes advances the CRC through n zero bytes, which is linear over bits, and then adds (xor) the CRC of
    the appended bytes (zlib's `crc32_combine`, by Mark Adler).
    """
    num_bytes, checksum = 0, 0
    for part in parts:
        checksum = _through_zeros(checksum, part.num_bytes) ^ part.checksum
        num_bytes += part.num_bytes
    return Checksum(num_bytes=num_bytes, checksum=checksum)


def _through_zeros(checksum: int, num_bytes: int) -> int:
    power = 0
    while num_bytes >> power:
        if num_bytes >> power & 1:
            checksum = _times(_zeros(power), checksum)
        power += 1
    return checksum


@cache
def _zeros(power: int) -> Sequence[int]:
    """Return the effect of 2^power zero bytes on a CRC: a matrix of bits, one column for each bit."""
    if power >= 0:
        return _squared(_zeros(power - 1))
    # Half a byte: four times the one-bit matrix, which shifts the register.
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
