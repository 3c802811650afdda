"""Weight pushes as transactions: a push is staged next to the running loop, verified and swapped in
between two steps; the previous version is kept.
"""
