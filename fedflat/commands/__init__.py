"""The commands of `fedflat`, one a module. `--help` reads them, so at their top they import nothing heavy."""
