"""Drafting without a model: continuations of earlier occurrences of the same tokens, in the prompt,
this output, its siblings and earlier responses.

One pool of tokens per prompt serves all requests of its group: running siblings, finished ones, and
responses to the same prompt in earlier rollouts; nothing is shared between salts. The longest
earlier occurrences of a request's last tokens become one trie with counts. Each node's acceptance
probability is learned online per (match length, share of matches that agree, depth). It needs no
torch and no network: it drafts before any drafter is trained, and when another drafter's acceptance
collapses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from tlt_kernels.cpu.match import match_pool
from tlt_server.speculation.batch import Candidates, DraftBatch
from tlt_server.speculation.calibration import OnlineTable
from tlt_server.speculation.drafters.cpu import DraftSetup, DraftWeights, Sleeper
from tlt_server.speculation.drafters.token_pool import TokenPool
from tlt_server.wire.records import Strategy

LENGTHS, SHARES, DEPTHS = 7, 8, 8
TYPICAL_LENGTH = (2.0, 3.0, 4.5, 7.0, 10.5, 14.0, 20.0)  # tokens, of each length bucket
PROMPTS = 1024  # prompts remembered as stored, per group


@dataclass(frozen=True)
class HistorySettings:
    longest: int = 16  # tokens; an occurrence is compared no further back
    shortest: int = 2  # tokens; shorter occurrences are ignored
    matches: int = 32  # occurrences merged into one trie
    pool_tokens: int = 1 << 19  # tokens per prompt, of running requests and earlier ones
    # Tokens per prompt of requests that have ended, the newest ones: 10 to 30 us per draft to scan.
    kept_tokens: int = 1 << 15
    # Tokens in all, and memory with spare room; the pools unused for longest go first.
    total_tokens: int = 1 << 23
    total_bytes: int = 1 << 27
    pools: int = 4096  # prompts remembered


def prior() -> NDArray[np.float32]:
    """Return the acceptance probabilities before any observation: share x L / (L + 3), for L common
    tokens. That is half the share at three, .84 of it at sixteen.
    """
    length = np.array(TYPICAL_LENGTH)[:, None, None]
    share = ((np.arange(SHARES) + 1) / SHARES)[None, :, None]
    return (
        np.broadcast_to(share * length / (length + 3), (LENGTHS, SHARES, DEPTHS))
        .reshape(-1)
        .astype(np.float32)
    )


@dataclass
class Group:
    """Requests and past responses that share a pool."""

    pool: TokenPool
    prompts: dict[bytes, None]  # digests of prompts stored, oldest first
    running: int = 0


@dataclass
class Running:
    group: Group
    segment: int
    taken: int  # tokens of the request that the pool has


class History:
    def __init__(self, settings: HistorySettings = HistorySettings()) -> None:
        self.settings = settings
        self.table = OnlineTable(prior())
        self._tokens = self._bytes = 0  # in all pools
        self._groups: OrderedDict[bytes, Group] = (
            OrderedDict()
        )  # by prompt, least recently used first
        self._by_group_id: dict[
            tuple[str, str], tuple[Group, int]
        ] = {}  # by salt and id: the group, and how many of it are running
        self._running: dict[str, Running] = {}
        self._asked = self._answered = 0

    @classmethod
    def make(cls, setup: DraftSetup) -> History:
        return cls()

    @property
    def caches(self) -> Sequence[Sleeper]:
        return ()

    @property
    def tables(self) -> Mapping[str, OnlineTable]:
        return {"history": self.table}

    def install(self, weights: DraftWeights | None) -> None:
        """Keep everything: drafts depend on text, not on weights."""

    def propose(self, batch: DraftBatch, strategy: Strategy) -> Candidates:
        depth_B = np.minimum(batch.max_depth_B, strategy.depth).astype(np.int32)
        if not len(batch) or strategy.width <= 0 or depth_B.max() <= 0:
            return Candidates.empty()
        members: dict[int, tuple[Group, list[int], list[int]]] = {}
        keys = zip(batch.salts or [""] * len(batch), batch.group_ids, strict=True)
        for b, (name, key, tokens) in enumerate(zip(batch.ids, keys, batch.tokens, strict=True)):
            state = self._follow(name, key, tokens, int(batch.prompt_len_B[b]))
            if state.taken < len(tokens):
                continue  # the pool is full of running requests
            _, segments, requests = members.setdefault(id(state.group), (state.group, [], []))
            segments.append(state.segment)
            requests.append(b)
        size = len(batch) * self.settings.matches * int(depth_B.max())
        request_N, parent_N, token_N, depth_N, rank_N, cell_N = (
            np.empty(size, np.int32) for _ in range(6)
        )
        acceptance_N = np.empty(size, np.float32)
        count = 0
        for group, segments, requests in members.values():
            pool, request_M = group.pool, np.array(requests, np.int32)
            count = match_pool(
                pool.tokens,
                pool.start_G,
                pool.length_G,
                np.array(segments, np.int32),
                request_M,
                depth_B[request_M],
                self.settings.longest,
                self.settings.shortest,
                self.settings.matches,
                strategy.width,
                self.table.acceptance_K,
                SHARES,
                DEPTHS,
                count,
                request_N,
                parent_N,
                token_N,
                depth_N,
                rank_N,
                acceptance_N,
                cell_N,
            )
        request_N, parent_N, token_N, depth_N, rank_N, cell_N = (
            a[:count].copy() for a in (request_N, parent_N, token_N, depth_N, rank_N, cell_N)
        )
        candidates = Candidates(
            request_N, parent_N, token_N, depth_N, rank_N, acceptance_N[:count].copy(), cell_N
        )
        self._asked += len(batch)
        self._answered += int(
            np.count_nonzero(np.diff(request_N, prepend=-1))
        )  # a request's nodes lie together
        return candidates

    def observe(self, batch: DraftBatch, candidates: Candidates, accepted_N: object) -> None:
        self.table.observe(candidates.cell_N, candidates.parent_N, np.asarray(accepted_N, np.int8))

    def finish(
        self, request_id: str, group_id: str, tokens: object, prompt_len: int, salt: str = ""
    ) -> None:
        key = salt, group_id
        state = self._follow(request_id, key, np.asarray(tokens, np.int32), prompt_len)
        del self._running[request_id]
        self._close(state.group, state.segment)
        state.group.running -= 1
        if key in self._by_group_id:
            group, running = self._by_group_id.pop(key)
            if running > 1:
                self._by_group_id[key] = group, running - 1
        self._evict()

    def forget(self) -> None:
        """Drop the text of all prompts that no running request uses."""
        for digest in [d for d, group in self._groups.items() if not group.running]:
            self._drop(digest)

    def check(self) -> None:
        """Assert that memory is bounded and the sums are consistent."""
        assert self._tokens == sum(group.pool.used for group in self._groups.values()), (
            "the token count drifts"
        )
        assert self._bytes == sum(group.pool.bytes for group in self._groups.values())
        for group in self._groups.values():
            group.pool.check()
            assert len(group.prompts) <= PROMPTS, "a group remembers too many prompts"
        if not self._running:
            assert self._fits, "eviction is too slow"

    def gauges(self) -> Mapping[str, float]:
        return {
            "history_pool_tokens": float(self._tokens),
            "history_pools": float(len(self._groups)),
            "history_pool_bytes": float(self._bytes),
            "history_hit_rate": self._answered / self._asked if self._asked else 0.0,
            "history_table_drift": self.table.drift,
        }

    def _follow(
        self, request_id: str, key: tuple[str, str], tokens: NDArray[np.int32], prompt_len: int
    ) -> Running:
        """Extend the request's pool to `tokens` and return the request's state."""
        state = self._running.get(request_id)
        if state is None:
            state = self._running[request_id] = self._start(key, tokens, prompt_len)
        if len(tokens) > state.taken and self._append(
            state.group, state.segment, tokens[state.taken :]
        ):
            state.taken = len(tokens)
        return state

    def _start(self, key: tuple[str, str], tokens: NDArray[np.int32], prompt_len: int) -> Running:
        """Join the pool of the group or, without a group, of the prompt. The prompt is stored once;
        a request repeats only its end, as context.
        """
        prompt = tokens[:prompt_len]
        salt, group_id = key
        salted = blake2b(salt.encode(), digest_size=16).digest() + prompt.tobytes()
        digest = blake2b(salted, digest_size=16).digest()
        known = self._by_group_id.get(key) if group_id else None
        group = known[0] if known else self._groups.get(digest)
        if group is None:
            pool = TokenPool(self.settings.pool_tokens, self.settings.kept_tokens)
            group = self._groups[digest] = Group(pool, {})
            self._bytes += pool.bytes
        if digest in self._groups:
            self._groups.move_to_end(digest)
        if digest not in group.prompts:
            group.prompts[digest] = None
            if len(group.prompts) > PROMPTS:
                del group.prompts[next(iter(group.prompts))]
            segment = self._open(group)
            self._append(group, segment, prompt)
            self._close(group, segment)
        group.running += 1
        if group_id:
            self._by_group_id[key] = group, (known[1] if known else 0) + 1
        return Running(group, self._open(group), max(0, prompt_len - self.settings.longest))

    def _open(self, group: Group) -> int:
        size = group.pool.bytes
        segment = group.pool.open()
        self._bytes += group.pool.bytes - size
        return segment

    def _append(self, group: Group, segment: int, tokens: NDArray[np.int32]) -> bool:
        used, size = group.pool.used, group.pool.bytes
        stored = group.pool.append(segment, tokens)
        self._tokens += group.pool.used - used
        self._bytes += group.pool.bytes - size
        return stored

    def _close(self, group: Group, segment: int) -> None:
        before = group.pool.used
        group.pool.finish(segment)
        self._tokens += group.pool.used - before

    @property
    def _fits(self) -> bool:
        return (
            self._tokens <= self.settings.total_tokens
            and self._bytes <= self.settings.total_bytes
            and len(self._groups) <= self.settings.pools
        )

    def _evict(self) -> None:
        """Drop the least recently used pools while there are too many tokens, bytes or pools."""
        for digest in list(self._groups) if not self._fits else ():
            if self._fits:
                return
            if not self._groups[digest].running:
                self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        pool = self._groups.pop(digest).pool
        self._tokens -= pool.used
        self._bytes -= pool.bytes
