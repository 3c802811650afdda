"""The chat format of the demo pair (ChatML), as plain strings: for the training scripts and tests,
no torch. The shipped template says the same.
"""

END = "<|im_end|>"
PAD = "<|endoftext|>"
SPECIALS = (PAD, "<|im_start|>", END)

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def render_prompt(prompt_text: str) -> str:
    """The text of one user turn and the opened assistant turn; equals the template applied with
    `add_generation_prompt`.
    """
    return f"<|im_start|>user\n{prompt_text}{END}\n<|im_start|>assistant\n"
