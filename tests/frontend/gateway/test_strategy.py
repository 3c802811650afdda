"""The tests of `test_strategy` on a gateway over one replica, which sees no engine die."""

from tests.frontend import test_strategy
from tests.frontend.live_gateway import behind_a_gateway

globals().update(
    behind_a_gateway(
        test_strategy,
        "test_a_policy_in_preparation_is_shown_next_to_the_active_one",
        "test_restart_restores_the_active_then_the_pending_policy",
        "test_policy_pending_at_two_engine_deaths_is_dropped",
        replicas=1,
    )
)
