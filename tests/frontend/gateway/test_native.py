"""The tests of `test_native` on a gateway over three replicas."""

from tests.frontend import test_native
from tests.frontend.live_gateway import behind_a_gateway

globals().update(
    behind_a_gateway(
        test_native,
        "test_sampling_of_an_item_overrides_each_field_it_sets",
        "test_probes_metrics_and_server_info_answer",
        "test_draft_limits_of_an_item_reach_the_engine",
    )
)
