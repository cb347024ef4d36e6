"""Personalised federated learning: parts that give every client its own model.

A client keeps either coordinates of the model (`private`: a head, a body, everything) or a second model in its state
(`personal`).
"""
