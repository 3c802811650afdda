"""Run the same GRPO steps without speculation and with it, and compare the runs bit by bit.

    python -m examples.grpo.compare --steps 5 --out build/grpo

Options are those of `examples.grpo.train`. Runs that were stopped go on. Exit status 1 where a
token, a log-prob, a reward or a weight differs.
"""

from __future__ import annotations

import sys

from examples.grpo.adapt import ADAPTATIONS
from examples.grpo.record import differences
from examples.grpo.train import arguments, train


def main() -> int:
    asked = arguments().parse_args()
    root, asked.resume = asked.out, True
    for asked.speculation in ADAPTATIONS:
        asked.out = root / asked.speculation
        print(f"speculation {asked.speculation}, into {asked.out}", flush=True)
        train(asked)
    first, *others = (root / speculation for speculation in ADAPTATIONS)
    differ = False
    for other in others:
        found = differences(first, other)
        differ |= bool(found)
        print(f"{first} and {other}: {', '.join(found[:8]) or 'the same bits'}")
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
