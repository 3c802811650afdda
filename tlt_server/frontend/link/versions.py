"""The expected weight versions, and which of them are lost. Nothing is generated while another
version is live instead.

A new epoch of the engine may have other weights than the one before: without a state directory
those of the model directory, with one those that could be restored. The engine client passes on
each epoch's report; a commit of the lost role ends the wait.
"""

from __future__ import annotations

from tlt_server.errors import Conflict, Unavailable
from tlt_server.wire.events import EngineInfo, WeightReport

ROLES = ("target", "drafter")
RETRY_S = 10  # about the time of a push


class WantedVersions:
    def __init__(self) -> None:
        self.lost: dict[str, str] = {}  # role -> the version, and why it is lost
        self._wanted: dict[str, str] = {}
        self.own: set[str] = set()  # drafters that the server has trained, so no caller wants them

    def begin(self, info: EngineInfo, *, unanswered: bool) -> None:
        """Record the versions of a new epoch. `unanswered`: weight commands were open when the
        previous epoch ended, so only a spool knows which version became live.
        """
        held = {"target": info.weight_version, "drafter": info.drafter_version}
        trusted = info.spooled and unanswered
        missing = (
            {}
            if trusted
            else {
                role: version
                for role, version in self._wanted.items()
                if version not in (held[role], *self.own)
            }
        )
        self.lost = {
            role: f"the weight version {version!r} of the {role} is lost: the engine was restarted "
            f"and holds {held[role]!r}"
            + ("" if info.spooled else "; --state-dir keeps versions over a restart")
            for role, version in missing.items()
        }
        self.lost |= info.lost
        self._wanted |= {role: held[role] for role in ROLES if role not in self.lost}

    def reported(self, report: WeightReport) -> None:
        """Record the result of a push. One that finds its version live counts like a committed one;
        naming a version brings no weights. A quarantined version is lost too.
        """
        self.lost |= report.state.quarantined
        if report.role == "adapter":
            return  # requests name the adapters that they want
        if report.result in ("committed", "named", "rolled_back", "unchanged"):
            live = {"target": report.state.target, "drafter": report.state.drafter}
            for role in ROLES if report.role in ("all", "") else (report.role,):
                if report.result == "named" and role in self.lost:
                    continue
                if report.result != "unchanged" or live[role] == report.version:
                    self._wanted[role] = live[role]
                    self.lost.pop(role, None)

    def check_name(self) -> None:
        """Raise `Conflict` while the target is lost: the weights that are live instead must not get
        its name.
        """
        if "target" in self.lost:
            raise Conflict(f"the live weights cannot be named: {self.reason}")

    @property
    def reason(self) -> str:
        """The reason why nothing is generated, with the remedy; empty if nothing is lost."""
        return (
            f"{'; '.join(self.lost.values())}. Push that version, or another (POST /update_weights)"
            if self.lost
            else ""
        )

    def check(self) -> None:
        """Raise `Unavailable` while a version is lost."""
        if self.lost:
            raise Unavailable(f"nothing is generated: {self.reason}", retry_after_s=RETRY_S)
