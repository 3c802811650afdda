"""The dialect `openai`: completions, chat completions, models, tokenize and detokenize.

In come bodies of the OpenAI API, which translate to native requests. Out go completions, whole or
in chunks, and errors in the OpenAI envelope. Only the table of dialects imports this room.
"""
