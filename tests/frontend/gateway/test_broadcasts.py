"""The tests of `test_broadcasts` on a gateway over one replica."""

from tests.frontend import test_broadcasts
from tests.frontend.live_gateway import behind_a_gateway

globals().update(
    behind_a_gateway(
        test_broadcasts,
        "test_broadcast_manifest_follows_how_its_group_was_made",
        "test_update_session_holds_pushes_of_every_channel",
        "test_a_push_without_a_version_can_be_aborted",
        replicas=1,
    )
)
