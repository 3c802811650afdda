"""Samples: arrays that do not fit each other are refused by name."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from tests.unit.sampled import samples


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("root_V", -1, "root_V"),
        ("root_V", 7, "root_V"),
        ("root_V", 1, "root_V"),
        ("accepted_V", 5, "accepted_V"),
        ("rows_V", 1, "accepted_V"),
        ("own_rows_V", 9, "own_rows_V"),
        ("own_accepted_V", 3, "own_accepted_V"),
        ("strategy_V", 9, r"strategy_V .* not in \[0, 2\)"),
        ("calibration_V", 1, r"calibration_V .* not in \[0, 1\)"),
        ("request_V", 2, r"request_V .* not in \[0, 2\)"),
    ],
)
def test_misfit_verifications_are_refused(name: str, value: int, says: str) -> None:
    found = samples()
    found.check()
    values = getattr(found.verified, name).copy()
    values[1] = value
    with pytest.raises(ValueError, match=says):
        replace(found, verified=replace(found.verified, **{name: values})).check()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("token_T", 50, r"token_T .* 50, not in \[0, 50\)"),
        ("token_T", -1, "token_T lies between -1"),
        ("prompt_len_N", -3, "prompt_len_N"),
        ("prompt_len_N", 99, "outputs"),
        ("start_N", 0, "start_N"),
        ("max_tokens_N", 1, "outputs"),
        ("temperature_N", np.nan, "sampling"),
        ("end_N", 4, "end_N"),
        ("span_version_S", 3, "span_version_S"),
        ("span_start_S", 5, "span_start_S"),
        ("span_request_S", 2, "span_request_S"),
    ],
)
def test_misfit_responses_are_refused(name: str, value: float, says: str) -> None:
    found = samples()
    values = getattr(found.responses, name).copy()
    values[1] = value
    with pytest.raises(ValueError, match=says):
        replace(found, responses=replace(found.responses, **{name: values})).check()


@pytest.mark.parametrize("part", ["responses", "verified"])
def test_arrays_of_unequal_length_are_refused(part: str) -> None:
    found = samples()
    arrays = getattr(found, part)
    for field in fields(arrays):
        if field.name != "token_T":
            short = replace(arrays, **{field.name: getattr(arrays, field.name)[:-1]})
            with pytest.raises(ValueError, match="does not fit the rest"):
                replace(found, **{part: short}).check()
