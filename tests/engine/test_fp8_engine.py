"""An engine on the CPU whose target is in FP8: no strategy, company or width changes a bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.halting import EAGLE
from tests.engine.pushing import Pushable, cpu_settings
from tests.engine.test_engine import bits, requests
from tests.engine.test_strict_numerics import CONFIG, TOKENS
from tests.engine.two_ranks import one, shared
from tests.rows_of_one import Sequence
from tlt_client.quantise import effective_checksum
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.engine.settings import EngineSettings
from tlt_server.models.decoder import Decoder
from tlt_server.models.loader import draw, load_target, read_tensor
from tlt_server.models.numerics import Numerics
from tlt_server.models.quantization import Quantization
from tlt_server.models.split import Split
from tlt_server.weights.checksums import live_sums
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import Strategy

__all__ = ["one", "shared"]  # fixtures
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def settings() -> EngineSettings:
    return cpu_settings(TARGET, DRAFTER, quantization="fp8", reduction_leaves=2)


def responses(engine: Pushable, policy: SetPolicy, count: int = 6) -> dict[str, Any]:
    engine.said.clear()
    engine.engine.send(policy)
    engine.submit(*requests(count))
    engine.finish()
    return bits(engine.said)


def test_strategies_and_widths_change_no_bit(one: Pushable, shared: Pushable) -> None:
    assert one.info.fingerprint == shared.info.fingerprint
    assert one.info.fingerprint.quantization == "fp8"
    expected = responses(one, SetPolicy("off"))
    for policy in (EAGLE, SetPolicy("fixed", Strategy("history", 6, 2, 8)), SetPolicy("off")):
        for engine in (one, shared):
            assert responses(engine, policy) == expected
    single = replace(one.settings, max_running=1, quantization="none")
    assert responses(Pushable(single), SetPolicy("off")) != expected, "nothing is in FP8"


def test_live_checksums_are_those_that_a_trainer_computes(one: Pushable) -> None:
    live = one.engine.pushes.transaction.versions.live.target
    assert live_sums(live.network.parameters())[Q] == effective_checksum(read_tensor(TARGET, Q))


def model_of(leaves: int = 1) -> Decoder:
    config = replace(CONFIG, quantization=Quantization())
    model = Decoder(config, numerics=Numerics("strict"), split=Split(leaves))
    draw(model.parameters())
    model.self_test()
    return model


def test_logits_stay_close_to_those_without_quantisation() -> None:
    """Errors of e4m3 are 3 % of a value, at random over 256 products and six maps."""
    exact, found = Decoder(CONFIG, numerics=Numerics("strict")), model_of()
    draw(exact.parameters())
    logits = [
        model.logits(Sequence(model, capacity=160).extend(TOKENS).hidden_RH)
        for model in (exact, found)
    ]
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0.001 < error < 0.1


def test_row_has_the_same_bits_in_any_company() -> None:
    for leaves in (1, 2):
        model = model_of(leaves)
        whole_RH = Sequence(model, capacity=160).extend(TOKENS).hidden_RH
        parts = Sequence(model, capacity=160)
        hidden = [parts.extend(part).hidden_RH for part in TOKENS.split([1, 2, 30, 64, 43])]
        assert torch.equal(torch.cat(hidden), whole_RH)


def test_random_weights_are_quantised_too() -> None:
    config = replace(CONFIG, quantization=Quantization())
    model = load_target(TARGET, numerics=Numerics("strict"), config=config, random=True)
    weight = model.parameters()[Q].whole()
    assert torch.equal(weight, weight.bfloat16().float()) and weight.std() > 0.05
