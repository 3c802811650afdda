"""Whole numbers on the command line of the benches, within bounds."""

from __future__ import annotations

import argparse

MAX = 2**20  # tokens, rows, threads


def count(text: str) -> int:
    return whole(text, 1, MAX)


def seed(text: str) -> int:
    return whole(text, 0, 2**31)


def whole(text: str, smallest: int, largest: int) -> int:
    if not text.isascii() or not text.isdigit() or not smallest <= int(text) <= largest:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number from {smallest} to {largest}"
        )
    return int(text)
