"""Bodies and attacks of `python -m tests.hostile`, and the judgement of its figures."""

from __future__ import annotations

import pytest

from tests.hostile.bodies import BODIES, Body
from tests.hostile.neighbours import attacks
from tests.hostile.table import SCENARIOS, Figure, rows


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.name)
def test_hostile_body_has_the_named_kind_and_size(body: Body) -> None:
    content = body.of(3 * 2**20)
    assert 0.99 * 3 * 2**20 < len(content) <= 3 * 2**20
    assert content.startswith(body.head + body.member) and content.endswith(body.tail)


def test_hostile_figures_are_judged_by_their_bounds() -> None:
    most = Figure("a", "bodies", "f", 20, 10)
    least = Figure("a", "tenants", "f", 0.95, 0.99, least=True)
    assert most.keeps(20, most.must) and not most.keeps(20.1, most.must)
    assert least.keeps(0.95, least.must) and not least.keeps(0.98, least.stretch)
    assert {row.scenario for row in rows({})} == set(SCENARIOS)
    memory = next(row for row in rows({"bodies": {"mib": 16}}) if row.unit == "MiB")
    assert memory.must == 64 + 4 * 16


def test_attacks_have_the_requested_size() -> None:
    for name, (_, body) in attacks(1.0).items():
        assert len(body) <= 1.1 * 2**20, name
