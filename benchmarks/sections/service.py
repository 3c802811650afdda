"""Sections about the server under load: many clients, overload, hostile clients, ranks that die,
long tests, and the tests on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.markdown import Figures, lines, model, table
from tests.hostile.table import rows as hostile_rows
from tlt_server.bench.tables import FRONTEND, LOAD, OVERLOAD

FAULTS = {
    "rank": "{rank}",
    "fault": "{fault}",
    "noticed": "{noticed_s:.2f}",
    "back": "{back_s:.1f}",
}


def load(figures: Figures) -> Iterator[str]:
    yield model(figures)
    yield (
        f"{figures['clients']} requests of {figures['max_tokens']} tokens, sent at "
        "once: in one batch, or by as many clients, whole or streamed. Medians of "
        f"{figures['rounds']} rounds; `frontend`: processor time. Texts that differ from the "
        f"batch's: {figures['texts_differing']}."
    )
    yield table(LOAD, figures["rows"])


def frontend(figures: Figures) -> Iterator[str]:
    yield (
        f"{figures['sequences']} sequences of {figures['tokens_each']} tokens: from an engine's "
        "events to the bytes of replies, without HTTP. `batch`: one request for all; the others: a "
        f"request each. Medians of {figures['rounds']} runs."
    )
    yield table(FRONTEND, figures["rows"])


def overload(figures: Figures) -> Iterator[str]:
    rows = ({**r, "load": load} for load, r in figures.items() if isinstance(r, dict))
    yield table(OVERLOAD, (row for row in rows if "goodput" in row))
    yield (
        f"Every request has exactly one end: {'yes' if figures['exactly_one_end'] else 'no'}. "
        f"Bounds missed: {', '.join(figures['missed']) or 'none'}."
    )


def hostile(figures: Figures) -> Iterator[str]:
    yield (
        "What one key's hostile clients do to others, on the shipped pair. `-`: no bound is set. "
        f"Bounds missed: {', '.join(figures['missed']) or 'none'}."
    )
    yield lines(
        ("what", "figure", "bound", "aim"),
        (
            (
                row.what,
                f"{figures[row.scenario][row.figure]:.3g} {row.unit}".strip(),
                "-" if row.must == float("inf") else f"{row.must:g}",
                "-" if row.stretch is None else f"{row.stretch:g}",
            )
            for row in hostile_rows(figures)
            if row.scenario in figures
        ),
    )


def soak(figures: Figures) -> Iterator[str]:
    storms = figures["storms"]
    sent = sum(count for what, count in storms.items() if what.startswith(("http", "grpc")))
    sound = sum(
        count for what, count in storms.items() if what.startswith("sound") and ":" not in what
    )
    if sent:
        yield (
            f"{sent} generated requests by HTTP and gRPC, {storms.get('kill', 0)} kills of the "
            f"engine, {storms.get('push', 0)} pushes and {storms.get('full', 0)} spells of a full "
            f"disk at once; {sound} sound results completed, each with the bits of an undisturbed "
            "run."
        )
    if kills := storms.get("kill under load"):
        ends = {what[4:]: count for what, count in storms.items() if what.startswith("end ")}
        total, completed = sum(ends.values()), ends.pop("completed", 0)
        errors = "".join(f", {count} with `{how}`" for how, count in ends.items())
        yield (
            f"{kills} kills of the engine or one of its ranks under load: {total} requests, "
            f"each with one end, {completed} with the tokens of an undisturbed run{errors}."
        )
    for name in ("counted", "ambiguous"):
        if attacked := storms.get(f"{name}: attack p99 ms"):
            yield (
                f"Attack by {name} structures: another key's p99 is {attacked} ms, "
                f"{storms[f'{name}: of idle']} times that of an idle engine and "
                f"{storms[f'{name}: of plain']} times that next to as many plain requests."
            )
    if faults := {what[6:]: n for what, n in storms.items() if what.startswith("fault ")}:
        listed = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in faults.items())
        moved = sum(n for what, n in storms.items() if what.startswith("fleet moves"))
        yield (
            f"{sum(faults.values())} faults of a fleet of three ({listed}), {moved} moves: no "
            f"response lost, {storms['fleet response of one version']} of one version with the "
            f"bits of one server, {storms['fleet response of several']} of several versions with "
            "the bits of the first one while it was live. A gateway that was killed served again "
            f"after at most {storms['fleet ms until a gateway served']} ms."
        )
    files = figures["files"].values()
    yield (
        f"Tests that failed: {sum(came.get('failed', 0) for came in files)}. Their seconds by "
        f"file, {sum(came['seconds'] for came in files):.0f} in all, are in the file."
    )


def faults(figures: Figures) -> Iterator[str]:
    yield (
        "Seconds from the signal until a stream ended with its error, and until the same request "
        "was answered again, with the same tokens."
    )
    yield table(FAULTS, figures["rows"])


def tests(figures: Figures) -> Iterator[str]:
    found = ", ".join(
        f"{name} {r['passed']} / {r['failed']} / {r['skipped']}"
        for name, r in figures["parts"].items()
    )
    yield f"Tests that passed / failed / were skipped: {found}."
    red = [name for r in figures["parts"].values() for name in r.get("red", ())]
    if red:
        yield f"Red: {', '.join(f'`{name}`' for name in red)}."
    exact = figures["exact"]
    if exact:
        width = exact.get("tensor_parallel", 1)
        yield (
            f"`tlt bench exact --quick{f' --tensor-parallel {width}' if width > 1 else ''}` on the "
            f"shipped pair: {exact['differing_tokens']} tokens and "
            f"{exact['differing_logprob_bits']} log-prob bits differ in {exact['requests']} runs "
            "of requests."
        )
