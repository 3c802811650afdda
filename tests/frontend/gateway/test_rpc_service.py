"""The tests of `test_rpc_service` on a gateway over three replicas."""

from tests.frontend import test_rpc_service
from tests.frontend.live_gateway import behind_a_gateway

globals().update(behind_a_gateway(test_rpc_service))
