"""`tlt drafter`: the subcommands that create, train and judge drafters without a server."""
