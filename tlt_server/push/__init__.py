"""`tlt weights`: push a checkpoint to a running server, look at its versions, roll back. No torch."""
