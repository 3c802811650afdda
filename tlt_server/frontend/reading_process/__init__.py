"""The process that reads large data: `python -m tlt_server.frontend.reading_process FD FD FD`.

It takes requests over one socket per lane, from the room `reading`, and one line of settings on
standard input, and returns values in pieces, or typed errors. It knows the types, the chat template
and the tokenizer, and imports every room whose data it reads; nothing imports it.
"""
