"""Names of versions and adapters: nothing unseen in them, and spans that can be read in one way."""

import re
import sys
import unicodedata

import pytest

from tlt_client.arguments import ADAPTER, SEEN, VERSION
from tlt_server.wire.records import adapted_version

UNSEEN_KINDS = {"Cc", "Cf", "Zl", "Zp"}
SPAN = re.compile(r"(.+)\+([^+@]+)@(.+)")


def test_names_have_no_invisible_character() -> None:
    for point in range(sys.maxunicode + 1):
        character = chr(point)
        if unicodedata.category(character) in UNSEEN_KINDS:
            for pattern in (SEEN, VERSION, ADAPTER):
                assert not re.fullmatch(pattern, f"a{character}b"), (pattern, hex(point))
    for name in ("math", "run 7", "Größe", "数学", "step~1", "a.b:c=d", "🙂"):
        assert all(re.fullmatch(pattern, name) for pattern in (SEEN, VERSION, ADAPTER)), name


@pytest.mark.parametrize("name", ["a+b", "a@b", "a/", "/a", "a//b", ".", "a/..", "../a", ""])
def test_adapter_names_fit_spans_and_paths(name: str) -> None:
    assert not re.fullmatch(ADAPTER, name)
    assert re.fullmatch(ADAPTER, "Qwen/Qwen3-4B")


def test_spans_name_target_and_adapter_unambiguously() -> None:
    versions = ["v1", "a@b+c", "1.0+x", "step-3@ab12", "a@b@c", "x+y+z"]
    assert all(re.fullmatch(VERSION, version) for version in versions)
    assert not re.fullmatch(VERSION, "v0+math@1")
    for target in versions:
        assert SPAN.fullmatch(target) is None
        for version in versions:
            span = adapted_version(target, "math", version)
            assert SPAN.findall(span) == [(target, "math", version)]
