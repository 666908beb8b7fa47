"""A small canvas: boxes, lines, dots and text in an 8-bit RGB image, and the image as PNG. numpy
and zlib, no more.

Places are in pixels of the result. Everything is painted at ZOOM times the size and averaged down
at the end, which smooths the edges.
"""

import math
import struct
import zlib

import numpy as np

ZOOM = 3
DOT = (
    5  # enlarged pixels a dot of a letter, so a letter is 10 by 15 pixels with the space around it
)

# Each glyph is 5 dots wide and 9 high (7, and 2 below the line): a base-32 digit a row, a bit a
# dot.
GLYPHS = "0123456789abcdefghijklmnopqrstuvwxyz.,-_+:/%()="
DOTS = (
    "ehjlphe004c4444e00eh1248v00v2421he0026aiv2200vgu11he0068guhhe00v12444400ehhehhe00ehhf12c0000e1fhf00gguhhhu00"
    "00egghe0011fhhhf0000ehvge0068u88880000fhhhf1egguhhhh0040c444e002062222icggikoki00c44444e0000qllll0000uhhhh00"
    "00ehhhe0000uhhhugg00fhhhf1100mpggg0000fge1u0088u88960000hhhjd0000hhha40000hllla0000ha4ah0000hhhjd1e00v248v00"
    "00000cc0000000cc48000u00000000000v00044v440000cc0cc000122488g00pq248bj0024444420084444480000v0v0000"
)

Color = tuple[int, int, int]


class Canvas:
    def __init__(self, width: int, height: int, background: Color):
        self.width, self.height = width, height
        self.pixels = np.full((height * ZOOM, width * ZOOM, 3), background, np.uint8)

    def box(self, left: float, top: float, right: float, bottom: float, color: Color) -> None:
        """A filled box with its edges included, so one of no width is a line of one pixel."""
        rows = slice(round(top) * ZOOM, (round(bottom) + 1) * ZOOM)
        self.pixels[rows, round(left) * ZOOM : (round(right) + 1) * ZOOM] = color

    def line(
        self, x: np.ndarray, y: np.ndarray, color: Color, radius: float, rows: tuple[int, int]
    ) -> None:
        """Straight lines between the points with a round pen, drawn between the two rows only."""
        # A spike far outside would take its length in memory; from so near outside it looks the
        # same.
        x, y = x * ZOOM, np.clip(y, -self.height, 2 * self.height) * ZOOM
        counts = np.ceil(np.maximum(abs(np.diff(x)), abs(np.diff(y)))).astype(int) + 1
        part = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        part = part / np.repeat(counts, counts)
        along = [np.repeat(c[:-1], counts) + part * np.repeat(np.diff(c), counts) for c in (x, y)]
        self.dots(
            np.append(along[0], x[-1]) / ZOOM,
            np.append(along[1], y[-1]) / ZOOM,
            color,
            radius,
            rows,
        )

    def dots(
        self, x: np.ndarray, y: np.ndarray, color: Color, radius: float, rows: tuple[int, int]
    ) -> None:
        """A disc at each place between the two rows."""
        inside = (y >= rows[0]) & (y <= rows[1])
        row, column = np.rint(y[inside] * ZOOM).astype(int), np.rint(x[inside] * ZOOM).astype(int)
        stride = self.width * ZOOM
        marks = np.unique(row * stride + column)
        flat, reach = self.pixels.reshape(-1, 3), round(radius * ZOOM)
        for down in range(-reach, reach + 1):
            across = int(math.sqrt(reach**2 - down**2))
            for right in range(-across, across + 1):
                flat[marks + down * stride + right] = color

    def text(self, x: float, y: float, words: str, color: Color, align: float = 0.0) -> None:
        """Words with their top at y; `align` 0 starts at x, 0.5 is centred on it, 1 ends there."""
        column, row = round((x - align * text_width(words)) * ZOOM), round(y * ZOOM)
        for letter in words.lower():
            at = GLYPHS.find(letter) * 9
            if at >= 0:  # a letter that the font lacks is a space
                rows = [
                    [int(digit, 32) >> 4 - dot & 1 for dot in range(5)]
                    for digit in DOTS[at : at + 9]
                ]
                glyph = np.kron(rows, np.ones((DOT, DOT), int)).astype(bool)
                self.pixels[row : row + 9 * DOT, column : column + 5 * DOT][glyph] = color
            column += 6 * DOT

    def png(self) -> bytes:
        large = self.pixels.reshape(self.height, ZOOM, self.width, ZOOM, 3)
        return png(large.mean((1, 3)).round().astype(np.uint8))


def text_width(words: str) -> float:
    return len(words) * 6 * DOT / ZOOM


def png(pixels: np.ndarray) -> bytes:
    """An 8-bit RGB image: header, the rows each after a zero (no filter) in one zlib stream,
    end.
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [
        chunk(b"IHDR", header),
        chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)),
        chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
