"""Running one or several experiments, and the results, in memory or in a folder."""
