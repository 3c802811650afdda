"""The tests of `test_structured_outputs` on a gateway over three replicas."""

from tests.frontend import test_structured_outputs
from tests.frontend.live_gateway import behind_a_gateway

globals().update(behind_a_gateway(test_structured_outputs))
