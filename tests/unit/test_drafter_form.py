"""Auto keeps a drafter in FP8 once replays have shown that it loses next to nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.unit.test_choice import CARD, chosen
from tlt_server.errors import StartupError
from tlt_server.trainer.judging.figures import ByResponse
from tlt_server.trainer.judging.form_test import LEAST_GROUPS, FormTest
from tlt_server.wire.kept import FORM, DrafterForm, read_form


def cycles(counts: np.ndarray) -> ByResponse:
    response_N = np.arange(len(counts))
    return ByResponse(response_N, counts, np.full(len(counts), 400), np.full(len(counts), np.nan))


@pytest.mark.parametrize(
    ("groups", "longer", "passed"),
    [(64, 0, True), (64, 1, False), (LEAST_GROUPS - 1, 0, False), (64, -1, True)],
)
def test_form_needs_the_accept_length_and_enough_prompts(
    groups: int, longer: int, passed: bool
) -> None:
    """A cycle more of a hundred is 1 % of the accept length."""
    group_N = np.repeat(np.arange(groups, dtype=np.int32), 2)
    before_N = np.random.default_rng(0).integers(90, 110, 2 * groups)
    test, half = FormTest(), groups // 2 * 2
    for part in (slice(0, half), slice(half, None)):  # whole groups
        before, after = before_N[part], before_N[part] + longer
        test.observe(cycles(before), cycles(after), group_N[part])
    assert test.passed == passed
    assert test.lost.value == pytest.approx(longer / 100, abs=1e-3)


def test_found_form_is_in_force_from_the_next_start(tmp_path: Path) -> None:
    drafter, other = tmp_path / "drafter", tmp_path / "other"
    DrafterForm(drafter=str(drafter), lost=0.0012).write(tmp_path / FORM)
    assert read_form(tmp_path / FORM, other) is None
    given = {"drafter": str(drafter), "state_dir": tmp_path}
    found, reasons = chosen(CARD, device="cuda", **given)
    assert found.drafter_quantization == "fp8"
    assert reasons["drafter_quantization"] == "fp8: in replays it lost 0.1% of the accept length"
    for changed in (
        {"drafter_quantization": "none"},
        {"drafter": str(other)},
        {"device": "cpu"},
        {"dtype": "float32"},
        {"state_dir": None},
    ):
        found, reasons = chosen(CARD, **{"device": "cuda", **given, **changed})
        assert found.drafter_quantization == "none" and "drafter_quantization" not in reasons
    (tmp_path / FORM).write_text("{")
    assert chosen(CARD, device="cuda", **given).settings.drafter_quantization == "none"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_drafter_in_fp8_needs_bfloat16_on_a_gpu(dtype: str) -> None:
    with pytest.raises(StartupError, match=f"dtype {dtype}.* use dtype bfloat16"):
        chosen(CARD, device="cuda", dtype=dtype, drafter="d", drafter_quantization="fp8")
