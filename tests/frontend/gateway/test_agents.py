"""The tests of `test_agents` on a gateway over three replicas."""

from tests.frontend import test_agents
from tests.frontend.live_gateway import behind_a_gateway

globals().update(behind_a_gateway(test_agents))
