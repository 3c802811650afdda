"""The trainer process of a server: its rings, its directories, and its launch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from functools import partial
from pathlib import Path

import msgspec

from tlt_server.config import SAMPLE_RING_MB, Config, ResolvedConfig
from tlt_server.frontend.link.trainer import TrainerLink
from tlt_server.metrics import Metrics
from tlt_server.models.environment import library_environment
from tlt_server.process.machine import client_environment
from tlt_server.process.private import private_directory
from tlt_server.samples.activity import Activity, make_activity
from tlt_server.samples.excerpt import SampleFiles
from tlt_server.samples.ring import WORK, make_ring
from tlt_server.settings.server import available_processors
from tlt_server.speculation.drafters import weights_directory
from tlt_server.trainer.process.main import MAX_REPORT
from tlt_server.trainer.process.schedule import MODES
from tlt_server.wire.kept import FORM
from tlt_server.wire.training import TrainerSettings

TRAINER = (sys.executable, "-P", "-m", "tlt_server.trainer.process.main")
RING, FEATURE_RING, ACTIVITY = "samples", "features", "activity"  # in the server's own directory
SAMPLES, CHECKPOINTS = "samples", "checkpoints"  # in the state directory


def rings(config: Config, directory: Path) -> tuple[Path | None, Path | None]:
    """Return the rings to the trainer: of sequences and of their features; None: not kept."""
    if config.drafter_training == "off":
        return None, None
    return directory / RING, directory / FEATURE_RING if config.drafter_feature_mb else None


def trainer_of(config: ResolvedConfig, directory: Path, metrics: Metrics) -> TrainerLink | None:
    """Return the link to the trainer, with rings in `directory`; None if nothing is recorded."""
    if config.drafter_training == "off":
        return None
    samples, features = rings(config, directory)
    assert samples is not None
    make_ring(samples, min(config.drafter_ring_mb, SAMPLE_RING_MB) * 2**20)
    if features is not None:
        make_ring(features, config.drafter_ring_mb * 2**20)
    private_directory(directory / WORK)
    files = SampleFiles(config.state_dir / SAMPLES, config.model) if config.state_dir else None
    if files is not None:
        files.inbox.clear()
    return TrainerLink(
        partial(_launch_trainer, config, directory, files),
        metrics.samples,
        files,
        directory / WORK if weights_directory(config.drafter) else None,
        metrics.training,
    )


def activity_of(config: ResolvedConfig, directory: Path) -> Activity:
    """Return the frontend's half of the activity file, in `directory`."""
    if config.drafter_training == "off":
        return Activity()
    make_activity(directory / ACTIVITY)
    return Activity(directory / ACTIVITY, MODES[config.drafter_training].parks_for)


async def _launch_trainer(
    config: ResolvedConfig, directory: Path, files: SampleFiles | None
) -> Process:
    """Start a trainer process, which reads the ring in `directory`."""
    mode = MODES[config.drafter_training]
    environment = {**os.environ, **library_environment(config.numerics)}
    environment |= client_environment(config.drafter_training_percent) if mode.shares else {}
    environment.pop(config.api_key_variable, None)
    process = await asyncio.create_subprocess_exec(
        *TRAINER, stdin=PIPE, stdout=PIPE, env=environment, limit=MAX_REPORT
    )
    assert process.stdin is not None
    drafter, is_open = weights_directory(config.drafter), config.drafter_quantization is None
    settings = TrainerSettings(
        ring=str(directory / RING),
        model=str(config.model.resolve()),
        directory=str(files.directory.resolve()) if files else "",
        tokens=config.drafter_buffer_tokens,
        bytes=config.drafter_buffer_mb * 2**20,
        parent=os.getpid(),
        feature_ring=str(directory / FEATURE_RING) if config.drafter_feature_mb else "",
        feature_bytes=config.drafter_feature_mb * 2**20,
        feature_staleness=config.feature_staleness,
        activity=str(directory / ACTIVITY) if drafter else "",
        work=str(directory / WORK),
        memory=(config.drafter_training_mb or 0) * 2**20,
        numerics=config.numerics,
        threads=mode.threads(available_processors(), config.threads),
        shares=mode.shares,
        drafter=str(drafter.resolve()) if drafter else "",
        form=str(config.state_dir.resolve() / FORM) if config.state_dir and is_open else "",
        checkpoints=str((config.state_dir or directory).resolve() / CHECKPOINTS),
    )
    with contextlib.suppress(ConnectionError):
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        await process.stdin.drain()
    return process
