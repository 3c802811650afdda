"""Columns of the tables that benches print, and docs/performance.md shows of their results."""

from __future__ import annotations

DECODE = {
    "batch": "{batch}",
    "prompt": "{prompt}",
    "ms per step": "{step_ms:.3f}",
    "tokens/s": "{tokens_per_s!n}",
    "price": "{percent:+.1f} %",
}
PREFILL = {
    "prompts": "{prompts} x {length}",
    "with": "{with}",
    "ms": "{ms:.1f}",
    "tokens/s": "{tokens_per_s!n}",
    "against cuBLAS + SDPA": "{ratio:.2f}x",
}
CYCLE = {
    "strategy": "{strategy}",
    "batch": "{batch}",
    "prompt": "{prompt}",
    "ms": "{step_ms:.3f}",
    "tokens/s": "{tokens_per_s!n}",
    "accept length": "{accept_length:.2f}",
    "GPU idle": "{gpu_idle_percent:.2f} %",
}
STRUCTURES = {
    "strategy": "{strategy}",
    "batch": "{batch}",
    "us per token": "{plain_us:.0f}",
    "with a schema": "{structured_us:.0f}",
    "ratio": "{ratio:.3f}",
    "per step": "{step_ratio:.3f}",
    "masks, us": "{mask_us:.0f}",
}
LORA = {
    "rank": "{rank}",
    "strategy": "{strategy}",
    "batch": "{batch}",
    "step, ms": "{plain_ms:.3f}",
    "with adapters, ms": "{adapted_ms:.3f}",
    "ratio": "{ratio:.3f}",
}
OVER_HTTP = {
    "requests": "{workload}",
    "policy": "{arm}",
    "s": "{seconds:.2f}",
    "tokens/s": "{tokens_per_s!n}",
    "against off": "{against_off:.2f}x",
    "against the best fixed": "{against_best_fixed:.2f}x",
}
REPLAY = {
    "policy": "{policy}",
    "s": "{seconds:.2f}",
    "tokens/s": "{tokens_per_s!n}",
    "accept length": "{accept_length:.2f}",
    "switches": "{switches}",
    "regret": "{regret:.1%}",
    "expected": "{expected_regret:.1%}",
}
LOAD = {
    "policy": "{policy}",
    "way": "{way}",
    "logprobs": "{logprobs:d}",
    "tokens/s": "{tokens_per_s!n}",
    "of one batch": "{of_batch:.2f}x",
    "frontend, us per token": "{frontend_us_per_token:.1f}",
}
OVERLOAD = {
    "offered": "{load}",
    "requests": "{requests}",
    "goodput, tokens/s": "{goodput!n}",
    "of peak": "{of_peak:.2f}",
    "refused": "{shed:.0%}",
    "late": "{late}",
    "refusals p99 ms": "{shed_p99_ms}",
}
