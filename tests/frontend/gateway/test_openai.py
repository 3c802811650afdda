"""The tests of `test_openai` on a gateway over three replicas."""

from tests.frontend import test_openai
from tests.frontend.live_gateway import behind_a_gateway

globals().update(
    behind_a_gateway(test_openai, "test_choices_are_prompt_major_and_carry_their_own_figures")
)
