"""The dialect `openai`: completions, chat completions, models, tokenize and detokenize.

Bodies of the OpenAI API translate to native requests; replies are completions, whole or in chunks,
and errors in the OpenAI envelope. Only the table of dialects imports this room.
"""
