"""The tests of `test_tenants` on a gateway over one replica."""

from tests.frontend import test_tenants
from tests.frontend.live_gateway import behind_a_gateway

globals().update(
    behind_a_gateway(
        test_tenants,
        "test_accepted_admin_calls_log_key_action_and_version",
        "test_a_change_of_state_by_get_or_head_is_audited",
        "test_keys_reload_while_serving_and_ignore_a_broken_file",
        replicas=1,
    )
)
