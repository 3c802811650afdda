"""Grammars of structured outputs: from what requests say to matchers of tokens. No torch.

`forms` turns each form that a request may have into a `records.Grammar`; `schemas` refuses keywords
of a JSON schema that would be ignored; `compiler` makes matchers. The frontend's reading process
compiles a grammar before it is let in, the engine compiles the same text for its sequences.
"""

KEPT = 256  # grammars that the frontend and the engine remember: what passes at once is there
