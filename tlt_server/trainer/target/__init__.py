"""The target over recorded tokens, where no engine has captured its states."""
