"""Named analyses of runs, as in `fedflat analyze`."""
