"""An in-process engine that captures states into a ring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.engine.pushing import Pushable
from tlt_server.engine.settings import EngineSettings
from tlt_server.samples.hidden_states import Captured, decode_captured
from tlt_server.samples.ring import RingConsumer, make_ring
from tlt_server.wire.commands import Recompute
from tlt_server.wire.records import GenerateRequest


class Capturing(Pushable):
    def __init__(
        self,
        settings: EngineSettings,
        directory: Path,
        feature_bytes: int = 2**26,
        ring: int = 2**23,
    ) -> None:
        directory.mkdir()
        for name in ("samples", "states"):
            make_ring(directory / name, ring)
        super().__init__(
            replace(
                settings,
                sample_ring=directory / "samples",
                feature_ring=directory / "states",
                feature_bytes=feature_bytes,
            )
        )
        self._ring = RingConsumer(directory / "states")
        self.capture = getattr(self.engine.runner, "_capture", None)  # None on a CPU

    def taken(self) -> dict[bytes, Captured]:
        if self.capture is not None:
            self.capture.states.settle()
        found = [decode_captured(content) for content in iter(self._ring.take, None)]
        return {captured.key: captured for captured in found}

    def text(self, request: GenerateRequest) -> bytes:
        text = [*request.token_ids, *self.tokens(request.id)]
        return np.array(text, "<i4").tobytes()

    def recomputed(self, texts: list[bytes]) -> dict[bytes, Captured]:
        self.engine.send(Recompute(texts))
        self.step()
        while self.engine.use_idle_time():
            self.finish()
        return self.taken()
