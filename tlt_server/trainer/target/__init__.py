"""Runs the target over recorded tokens, if no engine has captured its states."""
