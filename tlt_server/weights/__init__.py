"""Weight pushes as transactions: a push is staged while the loop runs, verified and swapped in
between two steps; the previous version is kept.
"""
