"""A small deterministic EAGLE-like network over real paged KV, and the same network with no cache
at all.

Legend as in `tlt_server.attention.rows`.
"""

import numpy as np
import torch

from tlt_server.attention.rows import KVCache
from tlt_server.speculation.batch import DraftBatch

VOCABULARY, HIDDEN, FEATURES = 40, 8, 12
PAGE_SIZE = 4


class FakeNetwork:
    """One attention layer in float32; `seen` records the (request, position) of rows given to each
    method.
    """

    def __init__(self, seed=0, draft_vocabulary=24, spread=3.0):
        random = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
        self.embed = normal(VOCABULARY, HIDDEN)
        self.fc, self.query, self.key, self.value, self.mix = (
            normal(n, HIDDEN) * n**-0.5
            for n in (FEATURES, 2 * HIDDEN, 2 * HIDDEN, 2 * HIDDEN, 2 * HIDDEN)
        )
        self.head = normal(HIDDEN, draft_vocabulary) * spread * HIDDEN**-0.5
        self.target_ids = (
            torch.randperm(VOCABULARY, generator=random)[:draft_vocabulary].sort().values
        )
        self.stored = []

    def make_cache(self, pages, page_size, scratch):
        return KVCache(
            layers=1, pages=pages, page_size=page_size, scratch=scratch, kv_heads=1, head_dim=HIDDEN
        )

    def fuse(self, features_RF):
        return features_RF @ self.fc

    def store_only(self, rows, g_RH, cache):
        x = torch.cat([self.embed[rows.token_R], g_RH], 1)
        cache.k[0, rows.kv_slot_R, 0] = x @ self.key
        cache.v[0, rows.kv_slot_R, 0] = x @ self.value
        self.stored += list(zip(rows.request_R.tolist(), rows.position_R.tolist(), strict=True))

    def forward(self, rows, g_RH, cache):
        self.store_only(rows, g_RH, cache)
        x = torch.cat([self.embed[rows.token_R], g_RH], 1)
        out = []
        for r in range(len(rows)):
            b, position = int(rows.request_R[r]), int(rows.position_R[r])
            base = int(rows.base_B[b])
            kv_slots = [
                int(rows.page_table_BP[b, p // cache.page_size]) * cache.page_size
                + p % cache.page_size
                for p in range(1, min(position + 1, base))
            ]
            kv_slots += [int(rows.path_RD[r, p - base]) for p in range(base, position + 1)]
            assert min(kv_slots) >= 0
            weight = torch.softmax(cache.k[0, kv_slots, 0] @ (x[r] @ self.query), 0)
            out.append(torch.tanh(x[r] @ self.mix + weight @ cache.v[0, kv_slots, 0]))
        return torch.stack(out)

    def logits(self, h_RH):
        return h_RH @ self.head

    def hidden_of(self, tokens, features, path):
        """h of the last token of tokens + path, from nothing; features[p] is the target's, tokens
        of the path use their parent's h.
        """
        known = len(tokens)
        inputs = [
            torch.cat([self.embed[tokens[p]], features[p - 1] @ self.fc]) for p in range(1, known)
        ]
        for at in range(known, known + len(path) + 1):
            x = torch.stack(inputs)
            weight = torch.softmax((x @ self.key) @ (x[-1] @ self.query), 0)
            h = torch.tanh(x[-1] @ self.mix + weight @ (x @ self.value))
            if at < known + len(path):
                inputs.append(torch.cat([self.embed[path[at - known]], h]))
        return h


class FakeEngine:
    """Pages and target features of a few requests; a feature is a pure function of the tokens up to
    its position.
    """

    def __init__(self, pages=64, seed=0):
        self.cache = KVCache(
            layers=1,
            pages=pages,
            page_size=PAGE_SIZE,
            scratch=1,
            kv_heads=1,
            head_dim=1,
            features=FEATURES,
        )
        # A slot that was never committed must not be read.
        self.cache.features_SF.fill_(float("nan"))
        self.free = list(range(pages))
        random = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCABULARY, FEATURES, generator=random)
        self.tokens, self.pages = {}, {}

    def features(self, tokens):
        """Return features, [len(tokens), F]."""
        total, out = torch.zeros(FEATURES), []
        for token in tokens:
            total = 0.5 * total + self.table[token]
            out.append(total.clone())
        return torch.stack(out)

    def extend(self, name, tokens, shared=()):
        """Append tokens to a request; all but the last get their features committed. `shared`:
        pages it starts with.
        """
        mine = self.tokens.setdefault(name, [])
        pages = self.pages.setdefault(name, list(shared))
        mine += tokens
        while len(pages) * PAGE_SIZE < len(mine):
            pages.append(self.free.pop())
        features = self.features(mine)
        for p in range(len(mine) - 1):
            self.cache.features_SF[pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE] = features[p]

    def release(self, name):
        del self.tokens[name]
        pages = self.pages.pop(name)
        self.free += pages
        return pages

    def batch(self, names, *, temperature=1.0, max_depth=99, groups=None):
        width = max(len(self.pages[name]) for name in names)
        table = np.zeros((len(names), width), np.int32)
        for b, name in enumerate(names):
            table[b, : len(self.pages[name])] = self.pages[name]
        return DraftBatch(
            ids=list(names),
            group_ids=list(groups or names),
            tokens=[np.array(self.tokens[name], np.int32) for name in names],
            prompt_len_B=np.array([1] * len(names), np.int32),
            page_table_BP=table,
            seed_B=np.array([2**63 + 17 * b for b in range(len(names))], np.uint64),
            temperature_B=np.full(len(names), temperature, np.float32),
            max_depth_B=np.full(len(names), max_depth, np.int32),
        )
