"""The key file: what a line may say, what is refused and how, and when files are read again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tlt_server.config import Config
from tlt_server.demo.workload import TARGET
from tlt_server.errors import StartupError
from tlt_server.frontend.http.keys import LOOK_S, SCOPES, Caller, Keys, Watched, read_keys


def keys(tmp_path: Path, text: str, **settings: Any) -> Keys:
    (tmp_path / "keys").write_text(text)
    return read_keys(Config(model=TARGET, api_key_file=tmp_path / "keys", **settings))


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_key_file_line_holds_a_key_its_scopes_and_its_name(tmp_path: Path) -> None:
    found = keys(
        tmp_path,
        "# ours\n\n one scopes=data,operate name=ops\n"
        f"\tsha256:{digest('two').upper()}  name=pusher   scopes=push-weights\n"
        "three\r\nfour=/+== name=four.4\n",
    )
    assert found.find("one") == Caller("ops", frozenset({"data", "operate"}))
    assert found.find("two") == Caller("pusher", frozenset({"push-weights"}))
    assert found.find("three") == Caller(f"sha256:{digest('three')[:16]}", frozenset(SCOPES))
    assert found.find("four=/+==") == Caller("four.4", frozenset(SCOPES))
    assert found.unscoped == [f"sha256:{digest('three')[:16]}", "four.4"]
    for wrong in (
        "",
        "One",
        "one ",
        "# ours",
        "two scopes=push-weights",
        f"sha256:{digest('two')}",
        digest("two"),
    ):
        assert found.find(wrong) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key; write one per line"),
        ("# nothing\n", "holds no key"),
        ("ok\nSECRET scopes=data scopes=operate", "line 2 of api_key_file"),
        ("SECRET scopes=", "something after the key"),
        ("SECRET with blanks", "no spaces within these"),
        ("SECRET role=data", "one scopes=... or one name=..."),
        (
            "SECRET scopes=oprate",
            "has the scope 'oprate'; known are data, push-weights, operate, link; did you mean "
            "operate?",
        ),
        ("SECRET scopes=data,", "has the scope ''"),
        ("SECRET name=a/b", "names the key 'a/b'; a name has 1 to 64 letters"),
        ("SECRET name=" + "n" * 65, "1 to 64 letters"),
        ("sha256:SECRET", "but 64 hex digits do not follow"),
        ("sha256:" + "0" * 63, "64 hex digits"),
        ("SECRÉT", "no header can carry"),
        ("SECRET\nSECRET scopes=data", "given twice"),
        (f"SECRET\nsha256:{digest('SECRET')} name=x", "given twice"),
    ],
)
def test_invalid_key_file_lines_are_refused_without_the_key(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(StartupError) as caught:
        keys(tmp_path, text)
    assert said in caught.value.message and "SECR" not in caught.value.message


def test_environment_variable_adds_keys_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_KEYS", "late scopes=data\nlater scopes=operate")
    found = keys(tmp_path, "early scopes=data", api_key_variable="ROLLOUT_KEYS")
    assert [found.find(key) is not None for key in ("early", "late", "later")] == [True] * 3
    monkeypatch.delenv("ROLLOUT_KEYS")
    with pytest.raises(StartupError, match="'ROLLOUT_KEYS', which is not set"):
        keys(tmp_path, "early", api_key_variable="ROLLOUT_KEYS")
    with pytest.raises(StartupError, match="cannot read api_key_file .*: FileNotFoundError"):
        read_keys(Config(model=TARGET, api_key_file=tmp_path / "none"))


def test_key_sees_its_own_requests_and_operators_see_all(tmp_path: Path) -> None:
    found = keys(
        tmp_path,
        "a scopes=data name=a\nb scopes=push-weights name=b\nroot scopes=operate name=root",
    )
    a, b, root = (found.find(key) for key in ("a", "b", "root"))
    assert a is not None and b is not None and root is not None
    assert (a.sees("a"), a.sees("b"), a.sees(""), b.sees("a"), root.sees("a"), root.sees("")) == (
        True,
        False,
        False,
        False,
        True,
        True,
    )


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_changed_key_files_are_read_within_a_second(tmp_path: Path) -> None:
    file, clock, told, reads = tmp_path / "file", Clock(), list[str](), list[str]()

    def read() -> str:
        text = file.read_text() if file.exists() else ""
        reads.append(text)
        if "bad" in text or not text:
            raise StartupError("bad")
        return text

    with pytest.raises(StartupError):
        Watched("file", [file], read, told.append, clock)
    assert told == []
    file.write_text("one")
    held = Watched("file", [file], read, told.append, clock)
    assert (held(), told) == ("one", ["read"])
    file.write_text("two!")
    assert held() == "one", "not looked at again within the second"
    clock.now_s += LOOK_S
    assert held() == "two!"
    for _ in range(3):
        clock.now_s += LOOK_S
        assert held() == "two!"
    assert reads[1:] == ["one", "two!"], "unchanged, so not read"
    for broken in ("bad", None):
        file.write_text(broken) if broken else file.unlink()
        for _ in range(3):
            clock.now_s += LOOK_S
            assert held() == "two!", "what it held before"
    assert told == ["read", "read", "refused", "refused"], "once per change"
    file.write_text("end!")  # back again, of the size it had
    clock.now_s += LOOK_S
    assert held() == "end!"
