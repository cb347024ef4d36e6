"""Federated learning that generalises: every method a sum of small parts, one loop that runs them all."""
