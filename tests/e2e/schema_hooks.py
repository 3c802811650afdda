"""Loaded by the schemathesis command of `test_schema`: the check that says when a 5xx is right."""

import schemathesis

SHORT_S = 5  # a deadline below it may pass before a request of the test's size is done


@schemathesis.check
def only_deliberate_5xx(
    context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """No 5xx, but a 504 for a request that named so short a deadline itself, and a 503 for one of
    more takers of files than are served at a time.
    """
    timeout_s = case.body.get("timeout_s") if isinstance(case.body, dict) else None
    short = isinstance(timeout_s, int | float) and 0 < timeout_s < SHORT_S
    late = response.status_code == 504 and short
    taken = response.status_code == 503 and "servers take files here" in response.text
    assert response.status_code < 500 or late or taken, response.text
