"""`tlt weights`: push a checkpoint to a running server, look at its versions, abort, roll back. No
torch.
"""
