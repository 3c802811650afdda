"""Workloads of rollouts, and their requests. No torch."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tlt_server.wire.records import GenerateRequest

FULL = 4  # times the requests of a full batch that are sent, one after the other


class Workload(NamedTuple):
    name: str
    requests: int
    running: int  # requests open at once; 0: all, in one batch

    @classmethod
    def of(cls, name: str) -> Workload:
        full, _, count = name.rpartition(" ")
        return cls(name, FULL * int(count), int(count)) if full else cls(name, int(count), 0)


def shortened(request: GenerateRequest, max_tokens: int) -> GenerateRequest:
    """Return the request with exactly max_tokens, so that the batch stays full until the end."""
    return msgspec.structs.replace(
        request,
        sampling=msgspec.structs.replace(request.sampling, max_tokens=max_tokens, ignore_eos=True),
    )


def renamed(requests: list[GenerateRequest], turn: str) -> list[GenerateRequest]:
    """Return the same requests as new ones, with other ids, groups and a salt of their own, so that
    no run profits from an earlier one.
    """
    return [
        msgspec.structs.replace(r, id=f"{r.id}/{turn}", group_id=f"{r.group_id}/{turn}", salt=turn)
        for r in requests
    ]
