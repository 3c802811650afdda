"""The page pool against a brute-force twin: a list of holds and an ordered list of what may be
evicted.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tlt_server.engine.schedule.pages import PagePool, next_key, root_key

PAGES = 7
KEYS = [bytes([i]) for i in range(9)]


class PoolAgainstTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.reused: list[int] = []
        self.pool = PagePool(PAGES, 4, on_reuse=self.reused.extend)
        self.holds: list[list[int]] = []  # one list per holder
        self.key_of: dict[int, bytes] = {}  # twin of the index
        self.idle: list[int] = []  # twin of eviction order, oldest first

    def counts(self, page: int) -> int:
        return sum(hold.count(page) for hold in self.holds)

    @rule(n=st.integers(0, PAGES + 1))
    def allocate(self, n: int) -> None:
        unheld = [p for p in range(PAGES) if not self.counts(p)]
        self.reused.clear()
        pages = self.pool.allocate(n)
        if n > len(unheld):
            assert pages is None and not self.reused
            return
        assert pages is not None and len(set(pages)) == n and set(pages) <= set(unheld)
        assert self.reused == pages
        evicted = [p for p in pages if p in self.key_of]
        free = [p for p in unheld if p not in self.key_of]
        assert len(evicted) == max(0, n - len(free)), (
            "a cached page was evicted while a free one was left"
        )
        assert evicted == self.idle[: len(evicted)], "eviction is not oldest first"
        for page in evicted:
            self.idle.remove(page)
            del self.key_of[page]
        self.holds.append(pages)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def match(self, keys: list[bytes]) -> None:
        pages = self.pool.match(keys)
        by_key = {key: page for page, key in self.key_of.items()}
        expected = []
        for key in keys:
            if key not in by_key:
                break
            expected.append(by_key[key])
        assert pages == expected
        self.idle = [p for p in self.idle if p not in pages]
        self.holds.append(pages)

    @precondition(lambda self: any(self.holds))
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(sorted({p for hold in self.holds for p in hold})))
        self.pool.publish(page, key)
        if key not in self.key_of.values() and page not in self.key_of:
            self.key_of[page] = key

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.pool.release(hold)
        for page in reversed(hold):
            if not self.counts(page) and page in self.key_of and page not in self.idle:
                self.idle.append(page)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(self.holds))
        self.pool.withdraw(hold)
        self.key_of = {page: key for page, key in self.key_of.items() if page not in hold}

    @rule()
    def clear(self) -> None:
        self.pool.clear_index()
        self.key_of.clear()
        self.idle.clear()

    @invariant()
    def sound(self) -> None:
        self.pool.check(self.holds)
        assert self.pool.available == sum(not self.counts(p) for p in range(PAGES))
        assert self.pool.cached == len(self.idle)


PoolAgainstTwin.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestPoolAgainstTwin = pytest.mark.slow(PoolAgainstTwin.TestCase)


def test_page_keys_separate_versions_salts_and_prefixes() -> None:
    keys = {
        next_key(root_key(version, salt), tokens)
        for version in ("1", "2")
        for salt in ("", "a")
        for tokens in ([1, 2], [2, 1])
    }
    assert len(keys) == 8
    assert next_key(next_key(root_key("1", ""), [1]), [2]) != next_key(root_key("1", ""), [1, 2])
