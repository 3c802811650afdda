"""The engine process: decides on the host (scheduler, pages), computes in the runner, one page of
loop between them.
"""
