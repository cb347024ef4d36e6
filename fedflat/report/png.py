"""Images as PNG files, without a library for images."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np

GREY, COLOUR, INDEXED = 0, 2, 3
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(pixels: np.ndarray, palette: Sequence[tuple[int, int, int]] = ()) -> bytes:
    """A PNG file of bytes (height, width, 3) or (height, width); with a palette, these are positions in it."""
    kind = COLOUR if pixels.ndim == 3 else INDEXED if palette else GREY
    height, width = pixels.shape[:2]
    rows = pixels.astype(np.uint8).reshape(height, -1)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()  # 0: the row as it is
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))]
    chunks += [(b"PLTE", bytes(value for colour in palette for value in colour))] if kind == INDEXED else []
    chunks += [(b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")]
    return SIGNATURE + b"".join(_chunk(name, content) for name, content in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def as_link(content: bytes) -> str:
    """The file as an address that a page can show without loading anything."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
