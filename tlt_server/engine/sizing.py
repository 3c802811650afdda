"""The longest sequence and the number of KV pages: what was asked for, checked against the model
and the memory.
"""

from __future__ import annotations

import os

from tlt_server.engine.settings import DecidedSettings, EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig

MAX_POSITIONS = 1 << 22  # a rotary table of this length takes 4 GB at a head width of 128


def served_length(settings: EngineSettings, config: ModelConfig) -> int:
    """Return the positions of the longest sequence. `StartupError` when the model or this server
    has fewer than asked for.
    """
    chosen = settings.max_model_len or config.max_position
    if chosen > config.max_position:
        raise StartupError(
            f"max_model_len {chosen} exceeds the model's {config.max_position} positions; lower it"
        )
    if chosen > MAX_POSITIONS:
        raise StartupError(
            f"max_model_len {chosen} is above this server's limit of {MAX_POSITIONS} positions; "
            "lower it"
        )
    return chosen


def kv_pages(settings: DecidedSettings, bytes_per_page: int, max_model_len: int) -> int:
    """Return the pages asked for, or as many as fit and could be in use at once. `StartupError`
    when they are too few or too many.
    """
    need = -(-max_model_len // settings.page_size)
    pages = settings.pages
    if pages is None:
        assert settings.kv_memory_mb is not None, "a CPU has a default"
        pages = settings.kv_memory_mb * 2**20 // bytes_per_page
        if pages < need:
            raise StartupError(
                f"kv_memory_mb {settings.kv_memory_mb} holds {pages} pages, one sequence of "
                f"max_model_len {max_model_len} needs {need}; raise it to "
                f"{-(-need * bytes_per_page // 2**20)} or lower max_model_len"
            )
        pages = min(pages, need * settings.max_running)  # more could never be in use at once
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if pages * bytes_per_page > installed:
        raise StartupError(
            f"{pages} pages of {settings.page_size} tokens take "
            f"{pages * bytes_per_page // 2**20} MiB, this machine has {installed // 2**20}; lower "
            "pages, page_size or kv_memory_mb"
        )
    return pages
