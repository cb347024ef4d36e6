"""Personalised federated learning: parts that give every client a model of its own.

What a client keeps to itself is either coordinates of the model (`private`: a head, a body, everything) or a second
model in its state (`personal`).
"""
