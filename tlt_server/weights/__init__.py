"""Weight pushes as transactions: stage next to the running loop, verify, swap between two steps,
keep the version before.
"""
