"""The tests of `test_calls` on a gateway over one replica."""

from tests.frontend import test_calls
from tests.frontend.live_gateway import behind_a_gateway

globals().update(behind_a_gateway(test_calls, replicas=1))
