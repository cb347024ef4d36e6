"""The commands of `fedflat`, one a module. Their top levels must not import torch, numpy or rich: `--help` reads them."""
