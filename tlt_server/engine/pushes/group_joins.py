"""Process groups that trainers broadcast weights through. Threads join them; the loop leaves
them.
"""

from __future__ import annotations

from functools import partial

from msgspec import structs

from tlt_client.channels.errors import ChannelError
from tlt_client.channels.groups import Membership
from tlt_server.engine.pushes.reports import WeightReports
from tlt_server.errors import ChannelBroken, Conflict, Forbidden, TltError, from_code
from tlt_server.process.threads import Crew
from tlt_server.weights.transaction import Transaction
from tlt_server.weights.update import Push
from tlt_server.wire.commands import JoinGroup, LeaveGroup

MAX_JOINS = 4  # at once; a trainer whose ranks join one by one needs one at a time


class GroupJoins:
    def __init__(self, transaction: Transaction, reports: WeightReports) -> None:
        self._transaction, self._reports = transaction, reports
        self._joiners = Crew("join group", MAX_JOINS)

    @property
    def busy(self) -> bool:
        return self._joiners.busy

    def join(self, command: JoinGroup) -> None:
        """Answer once all ranks have joined, or the group's time limit has passed."""
        self._check_free(command.name)
        if "broadcast" not in self._transaction.options.channels:
            raise Forbidden(
                "this server takes no weights by broadcast; start it with broadcast among its "
                "--weight-channels"
            )
        self._joiners.check_room()
        self._transaction.leave(command.name)
        self._joiners.start(partial(self._join, command))

    def leave(self, command: LeaveGroup) -> None:
        if not command.out_of_step:
            self._check_free(command.name)
        self._transaction.skip(command.name)
        self._reports.report(command.id, "left")

    def _join(self, asked: JoinGroup) -> None:
        groups = self._transaction.options.intake.groups
        try:
            fields = {name: value for name, value in structs.asdict(asked).items() if name != "id"}
            groups.join(Membership(**fields, timeout_s=groups.timeout_s))
            self._reports.report(asked.id, "joined")
        except ChannelError as error:
            self._reports.refuse(asked.id, from_code(error.code, str(error)))
        except Exception as cause:  # every command is answered
            failed = ChannelBroken(
                f"the group cannot be joined ({type(cause).__name__}: {cause}); join it again"
            )
            self._reports.refuse(asked.id, failed)

    def _check_free(self, name: str) -> None:
        if self._transaction.brings(name):
            raise Conflict(f"group {name!r} brings a version just now; wait for that push to end")

    def to_send_again(self, push: Push, error: TltError) -> TltError:
        """Return a push's error with its consequence for the group. Clients retry after some
        errors, but the bytes sent through a group are gone, so a retry would wait for nothing.
        """
        group = push.manifest.group
        if group and error.retryable:
            return ChannelBroken(
                f"{error.message}. What came through group {group!r} is gone: join the group "
                "again, and send again what is asked for again"
            )
        left = group and group not in self._transaction.options.intake.groups
        if left and not isinstance(error, ChannelBroken):
            return type(error)(
                f"{error.message}; group {group!r} is left, as more of this may come through it: "
                "join it again"
            )
        return error
