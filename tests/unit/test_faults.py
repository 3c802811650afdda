"""Descriptions of exceptions that end the engine, and of ends of a child process."""

from __future__ import annotations

import re

import pytest
import torch

from tlt_server.process.faults import describe, exit_of, trace

DETAILS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call.\n"
    "Compile with `TORCH_USE_CUDA_DSA`."
)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered" + DETAILS),
        RuntimeError("CUDA error: an illegal memory access was encountered" + DETAILS),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
)
def test_gpu_error_is_named_in_one_line(error: Exception) -> None:
    assert (
        describe(error, ready=True)
        == "the GPU reported 'an illegal memory access was encountered'; the engine restarts"
    )
    assert (
        describe(error, ready=False)
        == "the GPU reported 'an illegal memory access was encountered'"
    )


def test_error_caused_by_a_gpu_error_is_a_gpu_error() -> None:
    with pytest.raises(KeyError) as caught:
        try:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        except RuntimeError:
            raise KeyError("slot") from None
    assert "unspecified launch failure" in describe(caught.value, ready=True)


def test_exhausted_memory_names_settings_to_lower() -> None:
    message = describe(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), ready=True
    )
    assert "Tried to allocate 2.00 GiB" in message
    assert "the engine restarts" in message
    assert "lower memory_fraction" in message


def test_internal_error_keeps_its_message_before_any_request() -> None:
    error = RuntimeError("shapes do not fit")
    assert describe(error, ready=False) == "RuntimeError: shapes do not fit"
    assert "shapes do not fit" in trace(error, ready=False)


def test_internal_error_after_requests_shows_type_and_place() -> None:
    with pytest.raises(KeyError) as caught:
        try:
            raise ValueError("a prompt")
        except ValueError as error:
            raise KeyError("a prompt") from error
    place = r"KeyError at .*test_faults\.py:\d+"
    assert re.fullmatch(f"{place}; the engine restarts", describe(caught.value, ready=True))
    stack = trace(caught.value, ready=True)
    assert "ValueError at" in stack and "KeyError at" in stack
    assert not [line for line in stack.splitlines() if line.endswith("a prompt")]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "ended with status 0"),
        (3, "ended with status 3"),
        (-9, "was ended by SIGKILL"),
        (-11, "was ended by SIGSEGV"),
        (-40, "was ended by signal 40"),
    ],
)
def test_process_end_is_described_by_status_or_signal(status: int, words: str) -> None:
    assert exit_of(status) == words
