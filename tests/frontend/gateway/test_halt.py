"""The tests of `test_halt` on a gateway over one replica."""

from tests.frontend import test_halt
from tests.frontend.live_gateway import behind_a_gateway

globals().update(
    behind_a_gateway(
        test_halt,
        "test_aborted_health_generate_made_no_token",
        "test_restarted_engine_receives_the_pause_and_the_sleep",
        "test_command_that_kills_the_engine_changes_no_state",
        replicas=1,
    )
)
