"""The tests of `test_adapters` on a gateway over one replica."""

from tests.frontend import test_adapters
from tests.frontend.live_gateway import behind_a_gateway

globals().update(
    behind_a_gateway(
        test_adapters,
        "test_requests_name_their_adapter_in_each_dialect",
        "test_weight_dir_with_an_adapter_is_loaded_for_the_model",
        "test_adapter_manifest_carries_its_configuration",
        "test_restarted_engine_has_its_target_and_no_adapter",
        replicas=1,
    )
)
