"""The tests of `test_client_habits` on a gateway over three replicas."""

from tests.frontend import test_client_habits
from tests.frontend.live_gateway import behind_a_gateway

globals().update(behind_a_gateway(test_client_habits))
