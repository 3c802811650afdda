"""The tests of `test_weight_updates` on a gateway over one replica."""

from tests.frontend import test_weight_updates
from tests.frontend.live_gateway import behind_a_gateway

globals().update(behind_a_gateway(test_weight_updates, replicas=1))
