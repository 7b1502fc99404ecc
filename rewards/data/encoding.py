"""Decoding of user-supplied text files, with or without a byte order mark."""

from __future__ import annotations

import codecs

MARK = "\ufeff"
"""A decoded byte order mark."""

# UTF-32 comes first, because its little-endian mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def decode_text(data: bytes) -> str:
    """Return the text of a file without its byte order mark: UTF-8, or UTF-16 or UTF-32 if the mark says so.

    Raises ValueError for other bytes, with a clause that begins with the place.
    """
    mark, encoding = next(((mark, name) for mark, name in _MARKS if data.startswith(mark)), (b"", "utf-8"))
    if not mark and b"\0" in data:
        line_number = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise ValueError(f"line {line_number} has a NUL character, as UTF-16 without its mark has; save it as UTF-8")
    try:
        # Programs that do not know the mark may add a second one.
        return data[len(mark) :].decode(encoding).lstrip(MARK)
    except UnicodeDecodeError as error:
        if encoding != "utf-8":
            raise ValueError(f"its byte order mark says {encoding.upper()}, and it is not; save it as UTF-8") from error
        *before, line = data[: len(mark) + error.start].split(b"\n")
        place = f"line {len(before) + 1}: byte {len(line) + 1}"
        raise ValueError(f"{place} is not UTF-8; save the file as UTF-8") from error
