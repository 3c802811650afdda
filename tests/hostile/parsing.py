"""The processor time that reading the largest batch takes: its last item is wrong, so all of it is
parsed and nothing generated.
"""

import statistics
from typing import Any

from tests.hostile.victim import Victim

ITEMS, IDS = 4000, 1900
ROUNDS = 3


def parsing(victim: Victim, *, items: int = ITEMS, ids: int = IDS) -> dict[str, Any]:
    item = b'{"token_ids":[' + b",".join([b"5"] * ids) + b"]}"
    body = b'{"requests":[' + b",".join([item] * items) + b',{"prompt":"a","n":1000000}]}'
    seconds = []
    for _ in range(ROUNDS):
        before_s = victim.cpu_s()
        status, said = victim.post("/generate", body)
        if status not in (400, 413):
            raise RuntimeError(f"the batch was to be refused once parsed: {status} {said[:300]!r}")
        seconds.append(victim.cpu_s() - before_s)
    return {
        "items": items,
        "ids": ids,
        "mib": round(len(body) / 2**20, 1),
        "cpu_s": round(statistics.median(seconds), 3),
        "refusal": said[:160].decode(errors="replace"),
    }
