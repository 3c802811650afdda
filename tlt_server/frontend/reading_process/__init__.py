"""The process that reads what is large: `python -m tlt_server.frontend.reading_process FD FD FD`.

Comes in: requests over one socket per lane, from the room `reading`, and on standard input one line
of settings. Goes out: values in pieces, or typed errors. It knows the types, the chat template and
the tokenizer, and imports every room whose data it reads; nothing imports it.
"""
