"""The engine process: settings as one line on stdin, commands and events over two ZeroMQ sockets,
one loop.

`build.py` starts it as `python -P -m tlt_server.engine.process DIR`; the parent has set the
environment that strict numerics needs before torch is imported. It ends after `Stop`, with its
parent, or with one `Failed` event. After a fault it exits at once: freeing memory on a GPU whose
context is lost may hang or abort.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # The parent decides: on Ctrl-C it drains, then sends Stop. Imports take a second or two.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import zmq

from tlt_kernels.parents import end_with
from tlt_server.engine.phases import Phases
from tlt_server.engine.settings import EngineSettings, decode_settings
from tlt_server.errors import EngineFailed, TltError
from tlt_server.process.faults import describe, trace
from tlt_server.process.garbage import loading
from tlt_server.wire.events import Event, Failed, Heartbeat, Phase, PhaseProgress, Ready, of_step
from tlt_server.wire.kept import StartedFile
from tlt_server.wire.records import encode

NICENESS = 5  # after the frontend, which must answer at once also while every core computes
IDLE_POLL_MS = 200
HEARTBEAT_S = 1.0  # from this thread, so that a loop which hangs falls silent
BUSY_POLL_MS = 5  # an idle engine looks this often whether a push is staged, something compiled


def serve(
    settings: EngineSettings, commands: zmq.Socket[bytes], send: Callable[[Event], None]
) -> None:
    """Build the engine, then step until a `Stop` ends it."""
    assert settings.directory is not None

    def on_phase(name: str, seconds: float, detail: str) -> None:
        send(Phase(name, seconds, detail))

    def on_progress(name: str, done: int, of: int) -> None:
        send(PhaseProgress(name, done, of))

    # Imported here, as this takes a while and may fail: a phase like the others.
    with Phases(on_phase, on_progress)("import libraries"), loading():
        from tlt_server.engine.start.assembly import assemble

    note = StartedFile(settings.directory).note
    engine, info = assemble(settings, on_phase, note, on_progress)
    gc.collect()
    gc.freeze()  # what was loaded stays; a collection of it would stop the loop for 0.25 s
    send(Ready(info))
    reported: dict[str, float] = {}
    last_event_s = time.monotonic()
    more = False  # to be done in idle time
    while not engine.finished:
        idle, came = engine.idle, False
        if idle:
            engine.choice.knowledge_file.save_now_and_then(engine.choice.knowledge)
        compiling = engine.compiling
        busy = engine.pushes.busy or compiling or engine.choice.changes.due
        patience_ms = BUSY_POLL_MS if busy else IDLE_POLL_MS
        timeout_ms = patience_ms if (idle or compiling) and not more else 0
        while commands.poll(timeout_ms):
            engine.receive(commands.recv())
            timeout_ms, came = 0, True
        outputs = engine.step()
        events: list[Event] = [*engine.reports()]
        gauges = engine.gauges()
        # A command can change gauges without a step.
        if outputs or engine.last_cycle or gauges != reported:
            reported = gauges
            switches = engine.choice.switches.take()
            events += of_step(outputs, gauges, engine.last_cycle, switches, engine.gaps)
        # After the ends, and the gauges, that the commands brought about.
        events += engine.control_reports()
        if not events and time.monotonic() - last_event_s >= HEARTBEAT_S:
            events.append(Heartbeat())
        for event in events:
            send(event)
            last_event_s = time.monotonic()
        more = idle and not came and engine.use_idle_time()
    engine.choice.knowledge_file.save(engine.choice.knowledge)


def main() -> int:
    os.nice(NICENESS)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    directory = sys.argv[1]
    context = zmq.Context()
    commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(f"ipc://{directory}/commands")
    events.connect(f"ipc://{directory}/events")
    events.setsockopt(zmq.LINGER, 2000)
    ready = False

    def send(event: Event) -> None:
        nonlocal ready
        ready = ready or isinstance(event, Ready)
        events.send(encode(event))

    try:
        settings = decode_settings(sys.stdin.buffer.readline())
        end_with(settings.parent)
        serve(replace(settings, directory=Path(directory)), commands, send)
        return 0
    except TltError as error:
        send(Failed(error.code, error.message))
        return 2
    except Exception as error:
        print(trace(error, ready=ready), file=sys.stderr)
        send(Failed(EngineFailed.code, describe(error, ready=ready)))
        context.destroy(linger=2000)
        sys.stderr.flush()
        os._exit(1)  # while the traceback still holds everything that would be freed
    finally:
        context.destroy(linger=2000)


if __name__ == "__main__":
    sys.exit(main())
