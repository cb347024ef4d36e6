"""The leaderboard: every method under one set-up, each with hyper-parameters of the same small search."""
