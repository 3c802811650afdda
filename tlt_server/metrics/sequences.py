"""Metrics of sequences: how many, how many tokens, and how long each part of them took."""

from __future__ import annotations

from tlt_server.metrics.kinds import LATENCY_S, Kinds

TOKEN_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 5)


class SequenceMetrics:
    def __init__(self, kinds: Kinds) -> None:
        self.ended = kinds.counter(
            "tlt_sequences", "Sequences ended, by finish reason or error code.", "result"
        )
        self.open = kinds.gauge("tlt_open_sequences", "Sequences accepted and not ended.")
        self.open_tokens = kinds.gauge(
            "tlt_open_tokens", "Prompt plus max_tokens of sequences accepted and not ended."
        )
        self.forecast_pages = kinds.gauge(
            "tlt_forecast_pages", "KV pages that these sequences are expected to need in all."
        )
        self.forecast_wait_s = kinds.gauge(
            "tlt_forecast_wait_seconds",
            "Until a sequence accepted now would begin; 0 = at once, or not known.",
        )
        self.generated = kinds.counter("tlt_generated_tokens", "Tokens given to requests.")
        self.stale = kinds.counter(
            "tlt_stale_tokens",
            "Tokens of ended sequences made by another weight version than the one live at the "
            "end.",
        )
        self.prompt = kinds.counter(
            "tlt_prompt_tokens", "Prompt tokens of requests accepted, each choice counted."
        )
        self.cached = kinds.counter(
            "tlt_cached_tokens", "Prompt tokens served by the prefix index."
        )
        self.queued_s = kinds.histogram(
            "tlt_queue_seconds",
            "From a sequence's arrival at the engine until it was started.",
            LATENCY_S,
        )
        self.first_token_s = kinds.histogram(
            "tlt_time_to_first_token_seconds",
            "From acceptance to the first token of a sequence.",
            LATENCY_S,
        )
        self.inter_token_s = kinds.histogram(
            "tlt_inter_token_seconds",
            "Between two outputs of a sequence, per token of the second; one observation per "
            "output.",
            TOKEN_S,
        )
        self.end_to_end_s = kinds.histogram(
            "tlt_end_to_end_seconds", "From acceptance to the end of a sequence.", LATENCY_S
        )
