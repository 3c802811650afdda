"""`tlt serve` with the fake engine's process in place of the real one: arguments are its mode and
the flags of serve.

The server's limits on waiting for replies and for an engine to end are longer than any test waits,
so a test that runs into one fails.
"""

import sys
from pathlib import Path

from tlt_server import __main__, build
from tlt_server.frontend.link import link as engine_link

build.ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")), sys.argv[1])
build.FLUSH_S, engine_link.STOP_S = 120, 120.0
sys.exit(__main__.main(["serve", *sys.argv[2:]]))
