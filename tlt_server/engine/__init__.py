"""The engine process: the scheduler decides on the host, the runner computes, and one page of loop
connects them.
"""
