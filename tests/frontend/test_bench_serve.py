"""`tlt bench serve`: the figures of answers whose times are known, and a run against a server."""

import json
from pathlib import Path

import pytest
import trustme

from tests.frontend.live_server import live_server
from tlt_server.__main__ import _parse, main
from tlt_server.bench.load import Answer, TimedChunk
from tlt_server.bench.serve import figures, times_of
from tlt_server.errors import StartupError


def event(text: str = "", usage: int = 0, finish: str | None = None) -> bytes:
    content = {"choices": [{"text": text, "finish_reason": finish}]} if text or finish else {}
    if usage:
        content["usage"] = {"completion_tokens": usage, "prompt_tokens": 4}
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def streamed(*arrivals: tuple[float, bytes], status: int = 200) -> Answer:
    """Return the answer to a request that was sent at second 10."""
    chunks = tuple(TimedChunk(10 + at_s, data) for at_s, data in arrivals)
    body = b"".join(chunk.data for chunk in chunks)
    return Answer(9.99, 10.0, chunks[-1].at_s if chunks else 10.0, status, {}, body, chunks)


END = (0.51, event(usage=5) + b"data: [DONE]\n\n")
WHOLE = streamed(
    (0.1, event("a")), (0.2, event("b") + event("c")), (0.5, event("de", finish="length")), END
)


def test_token_times_account_for_chunks_of_several_tokens() -> None:
    served = times_of(WHOLE)
    assert served is not None and served.tokens == 5
    assert (served.ttft, served.e2el) == (pytest.approx(100), pytest.approx(500))
    assert served.itl == [pytest.approx(100), pytest.approx(300)]
    assert served.tpot == pytest.approx(100)


@pytest.mark.parametrize(
    "answer",
    [
        streamed((0.1, event("a")), (0.2, event("b"))),
        streamed((0.1, event("a")), END, status=429),
        streamed((0.1, b'data: {"choices": 3}\n\n'), END),
        streamed(END),
        streamed(),
        Answer(9.9, 10.0, 11.0, 200, {}, b"{}"),
    ],
)
def test_an_incomplete_stream_counts_as_failed(answer: Answer) -> None:
    assert times_of(answer) is None
    assert figures([answer, WHOLE], 2.0, 4, {})["failed"] == 1


def test_goodput_counts_requests_within_all_objectives() -> None:
    slow = streamed((0.4, event("a")), (0.5, event("b", finish="length")), END)
    found = figures([WHOLE, slow], 2.0, 4, {"ttft": 200, "e2el": 1000})
    assert (found["completed"], found["goodput_per_s"], found["requests_per_s"]) == (2, 0.5, 1.0)
    assert (found["output_tokens_per_s"], found["total_tokens_per_s"]) == (5.0, 9.0)
    assert found["ttft_ms"] == {"mean": 250, "p50": 100, "p90": 400, "p95": 400, "p99": 400}
    assert found["load_lag_p99_ms"] == pytest.approx(10)
    assert figures([WHOLE, slow], 2.0, 4, {})["goodput_per_s"] == 1.0


@pytest.mark.parametrize("rate", ["inf", "200"])
def test_bench_serve_measures_a_server(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rate: str
) -> None:
    file = tmp_path / "serve.json"
    sizes = ["--num-prompts", "12", "--input-len", "9", "--output-len", "8", "--vocab", "100"]
    with live_server(model) as server:
        flags = ["--url", server.url, "--request-rate", rate, "--goodput", "ttft:60000"]
        assert main(["bench", "serve", *flags, *sizes, "--json", str(file)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(file.read_text())["figures"] == found
    assert (found["completed"], found["failed"]) == (12, 0)
    assert found["goodput_per_s"] == found["requests_per_s"] > 0
    assert found["output_tokens_per_s"] == pytest.approx(8 * found["requests_per_s"], rel=0.02)
    assert 0 < found["ttft_ms"]["p50"] <= found["e2el_ms"]["p50"]


def test_bench_serve_runs_over_tls_with_a_key(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    authority, keys = trustme.CA(), tmp_path / "keys"
    keys.write_text("nightingale scopes=data\n")
    cert = authority.issue_cert("127.0.0.1")
    cert.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    cert.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with live_server(
        model, tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem", api_key_file=keys
    ) as server:
        assert server.url.startswith("https://")
        flags = ["--url", server.url, "--api-key-file", str(keys), "--num-prompts", "3"]
        flags += ["--input-len", "4", "--output-len", "5"]
        assert main(["bench", "serve", *flags, "--vocab", "100"]) == 0
        assert main(["bench", "serve", *flags, "--vocab", "1000000"]) == 1
    assert "3 requests failed; the first with HTTP 400: {" in capsys.readouterr().out


def test_bench_serve_names_an_unreachable_server() -> None:
    from tlt_server.bench import serve

    with pytest.raises(StartupError, match="http://127.0.0.1:9/v1/models does not name a model"):
        serve.run(_parse(["bench", "serve", "--url", "http://127.0.0.1:9"]))


@pytest.mark.parametrize(
    "flags",
    [["--request-rate", "0"], ["--request-rate", "nan"], ["--goodput", "ttfb:3"]]
    + [["--goodput", "ttft"], ["--goodput", "ttft:0"], ["--num-prompts", "0"]],
)
def test_bench_serve_flags_are_bounded(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(["bench", "serve", *flags])
