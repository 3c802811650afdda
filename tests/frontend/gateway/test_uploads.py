"""The tests of `test_uploads` on a gateway over one replica."""

from tests.frontend import test_uploads
from tests.frontend.live_gateway import behind_a_gateway

globals().update(
    behind_a_gateway(test_uploads, "test_part_uploaded_in_ranges_is_pushed_once", replicas=1)
)
