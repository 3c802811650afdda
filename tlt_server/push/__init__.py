"""`tlt weights`: push a checkpoint to a running server, show its versions, abort, roll back. It
imports no torch.
"""
