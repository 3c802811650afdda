"""The tests of `test_streams` on a gateway over three replicas."""

from tests.frontend import test_streams
from tests.frontend.live_gateway import behind_a_gateway

globals().update(behind_a_gateway(test_streams))
