"""The tests of `test_openai_refusals` on a gateway over three replicas."""

from tests.frontend import test_openai_refusals
from tests.frontend.live_gateway import behind_a_gateway

globals().update(behind_a_gateway(test_openai_refusals))
