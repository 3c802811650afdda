"""`tlt drafter`: the subcommands that make, train and judge drafters without a server."""
