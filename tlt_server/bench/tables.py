"""Tables of benches: rows of figures under headings, each with a format.

The terminal and docs/performance.md use the same records.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Columns = Mapping[str, str]  # heading -> format of a row's fields, e.g. "{step_ms:.3f}"
Row = Mapping[str, Any]


def number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.2f}"


class _Formatter(string.Formatter):
    """Formats with one more conversion: `!n`, a number with as many digits as it needs."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        return number(value) if conversion == "n" else super().convert_field(value, conversion)


def cells(columns: Columns, row: Row) -> list[str]:
    """Return a row's cells; empty for a missing field or None."""
    formatter, found = _Formatter(), []
    for form in columns.values():
        try:
            found.append(formatter.vformat(form, (), row))
        except (KeyError, TypeError):
            found.append("")
    return found


def show(console: Console, title: str, columns: Columns, rows: Iterable[Row]) -> None:
    """Print a table with right-aligned numbers."""
    lines = [cells(columns, row) for row in rows]
    table = Table(title=title)
    for at, heading in enumerate(columns):
        numbers = all(line[at][:1] in "0123456789+-" for line in lines)
        table.add_column(heading, justify="right" if numbers else "left")
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(table)


# Columns that docs/performance.md shows, too.
FLEET = {
    "replicas x requests": "{replicas} x {each}",
    "placing": "{policy}",
    "makespan, s": "{seconds:.1f}",
    "of even spreading": "{relative:.3f}",
    "tokens/s": "{tokens_per_s}",
    "read again": "{read_again}",
    "moves": "{moves}",
    "free in pieces of 10 s": "{free_percent:.1f} %",
}
FLEET_ROLLOUT = {
    "requests": "{workload}",
    "policy": "{policy}",
    "one server, tokens/s": "{one_tokens_per_s!n}",
    "fleet, tokens/s": "{fleet_tokens_per_s!n}",
    "over one": "{over_one:.2f}x",
    "gateway, of a core": "{gateway_percent:.0f} %",
}
DECODE = {
    "batch": "{batch}",
    "prompt": "{prompt}",
    "ms per step": "{step_ms:.3f}",
    "tokens/s": "{tokens_per_s!n}",
    "price": "{fast}",
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
FRONTEND = {
    "way": "{way}",
    "tokens per output": "{tokens}",
    "tokens per CPU-second": "{tokens_per_cpu_s}",
    "over one token each": "{over_single:.1f}x",
}
