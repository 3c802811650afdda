"""The tests of `test_validation` on a gateway over three replicas."""

from tests.frontend import test_validation
from tests.frontend.live_gateway import behind_a_gateway

globals().update(behind_a_gateway(test_validation))
