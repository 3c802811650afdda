"""Pages of KV: reference counts, the prefix index and eviction. No tensors.

A page is *held* (count > 0), *cached* (count 0 but still indexed under its key, evicted oldest
first) or *free*. Only pages full of committed positions are published to the index, so stale or
speculative KV never serves another sequence.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import chain

PageKey = bytes


def root_key(weight_version: str, tenant: str, adapter: str = "") -> PageKey:
    """Return the key before the first page. KV of different weight versions, tenants or adapter
    contents never shares a key.
    """
    names = repr((weight_version, tenant, adapter))
    return hashlib.blake2b(names.encode(), digest_size=16).digest()


def next_key(previous: PageKey, tokens: Sequence[int]) -> PageKey:
    """Return the key of a page that holds `tokens` and follows the pages of key `previous`."""
    return hashlib.blake2b(previous + array("i", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """`on_reuse(pages)` is called when pages are handed out for new content."""

    def __init__(
        self, pages: int, page_size: int, on_reuse: Callable[[list[int]], None] = lambda pages: None
    ) -> None:
        self.pages, self.page_size = pages, page_size
        self._on_reuse = on_reuse
        self._count = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[PageKey, int] = {}
        self._key: dict[int, PageKey] = {}

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        return self.pages - self.available

    @property
    def cached(self) -> int:
        return len(self._cached)

    def match(self, keys: Iterable[PageKey]) -> list[int]:
        """Hold and return the longest run of indexed pages from the first key on."""
        found: list[int] = []
        for key in keys:
            page = self._index.get(key)
            if page is None:
                break
            self._cached.pop(page, None)
            self._count[page] += 1
            found.append(page)
        return found

    def allocate(self, n: int) -> list[int] | None:
        """Take n pages with count 1. If fewer are available, return None and change nothing."""
        if n > self.available:
            return None
        pages = []
        for _ in range(n):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                del self._index[self._key.pop(page)]
            self._count[page] = 1
            pages.append(page)
        if pages:
            self._on_reuse(pages)
        return pages

    def publish(self, page: int, key: PageKey) -> None:
        """Index a held page whose positions are all committed. The first page under a key stays."""
        assert self._count[page] > 0, f"page {page} is published but not held"
        if key not in self._index and page not in self._key:
            self._index[key] = page
            self._key[page] = key

    def withdraw(self, pages: Iterable[int]) -> None:
        """Remove held pages from the index: later sequences cannot find them, and they become free
        once their holders release them.
        """
        for page in pages:
            assert self._count[page] > 0, f"page {page} is withdrawn but not held"
            if page in self._key:
                del self._index[self._key.pop(page)]

    def release(self, pages: Iterable[int]) -> None:
        """Drop one hold of each page, last page first, so that a chain is evicted from its end."""
        for page in reversed(list(pages)):
            assert self._count[page] > 0, f"page {page} is released but not held"
            self._count[page] -= 1
            if self._count[page] == 0:
                if page in self._key:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    @property
    def indexed(self) -> frozenset[PageKey]:
        """The keys of all pages that a sequence can find."""
        return frozenset(self._index)

    def clear_index(self, kept: Set[PageKey] = frozenset()) -> None:
        """Remove every cached prefix except the `kept` keys from the index. Held pages stay
        held.
        """
        for key in self._index.keys() - kept:
            page = self._index.pop(key)
            del self._key[page]
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def check(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Assert every invariant; with `holders`, also that the counts match their pages
        exactly.
        """
        free, cached = set(self._free), set(self._cached)
        held = {page: count for page, count in enumerate(self._count) if count}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is both free and cached"
        assert not held.keys() & (free | cached), "a page is held and free or cached"
        assert held.keys() | free | cached == set(range(self.pages)), "a page is lost"
        assert {page: key for key, page in self._index.items()} == self._key, (
            "index and keys disagree"
        )
        assert cached <= self._key.keys() and not free & self._key.keys(), (
            "an indexed page is free or a cached page is not indexed"
        )
        if holders is not None:
            assert held == dict(Counter(chain.from_iterable(holders))), (
                "counts differ from the holders' pages"
            )
