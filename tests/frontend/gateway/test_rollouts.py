"""The tests of `test_rollouts` on a gateway over one replica."""

from tests.frontend import test_rollouts
from tests.frontend.live_gateway import behind_a_gateway

globals().update(behind_a_gateway(test_rollouts, replicas=1))
