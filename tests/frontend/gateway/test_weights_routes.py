"""The tests of `test_weights_routes` on a gateway over one replica."""

from tests.frontend import test_weights_routes
from tests.frontend.live_gateway import behind_a_gateway

globals().update(
    behind_a_gateway(
        test_weights_routes,
        "test_manifest_reaches_the_engine_and_the_reply_its_outcome",
        "test_weights_are_staged_committed_aborted_and_rolled_back",
        "test_versions_with_url_characters_are_taken",
        replicas=1,
    )
)
