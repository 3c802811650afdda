"""Weight pushes as transactions: stage beside the running loop, verify, swap between two steps,
keep the version before.
"""
