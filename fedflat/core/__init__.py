"""The base of all other packages: the flat model, random streams, ordered sums, methods and parts."""
