"""Grammars of structured outputs: from the fields of requests to matchers of tokens. No torch.

`forms` turns each form of a request into a `records.Grammar`; `schemas` refuses keywords of a JSON
schema that would be ignored; `compiler` creates matchers. The frontend's reading process compiles a
grammar before admission, the engine compiles the same text for its sequences.
"""

KEPT = 256  # grammars that the frontend and the engine remember: what passes at once is there
