"""The first d1's own numbers (arXiv 2504.12216, table 1): LLaDA-8B-Instruct at 128, 256 and 512 slots, percent."""

from __future__ import annotations

from collections.abc import Mapping

LENGTHS = (128, 256, 512)
ROWS: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    "base": {
        "gsm8k": (68.7, 76.7, 78.2),
        "math500": (26.0, 32.4, 36.2),
        "countdown": (20.7, 19.5, 16.0),
        "sudoku": (11.7, 6.7, 5.5),
    },
    "+ SFT": {
        "gsm8k": (66.5, 78.8, 81.1),
        "math500": (26.2, 32.6, 34.8),
        "countdown": (20.3, 14.5, 23.8),
        "sudoku": (16.5, 8.5, 4.6),
    },
    "+ diffu-GRPO": {
        "gsm8k": (72.6, 79.8, 81.9),
        "math500": (33.2, 37.2, 39.2),
        "countdown": (33.2, 31.3, 37.1),
        "sudoku": (18.4, 12.9, 11.0),
    },
    "+ SFT + diffu-GRPO (d1-LLaDA)": {
        "gsm8k": (73.2, 81.1, 82.1),
        "math500": (33.8, 38.6, 40.2),
        "countdown": (34.8, 32.0, 42.2),
        "sudoku": (22.1, 16.7, 9.5),
    },
}
NOTE = (
    "The best checkpoint for each length, by the test data; Sudoku counts cells, and its 288 grids are in training and "
    "test. Not measured here."
)
