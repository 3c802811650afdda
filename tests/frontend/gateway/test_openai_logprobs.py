"""The tests of `test_openai_logprobs` on a gateway over three replicas."""

from tests.frontend import test_openai_logprobs
from tests.frontend.live_gateway import behind_a_gateway

globals().update(behind_a_gateway(test_openai_logprobs))
