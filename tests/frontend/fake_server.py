"""`tlt serve` with the fake engine's process in place of the real one: arguments are its mode and the flags of serve."""

from __future__ import annotations

import sys
from pathlib import Path

from tlt_server import __main__, build

build.ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")), sys.argv[1])
sys.exit(__main__.main(["serve", *sys.argv[2:]]))
