"""Showing results: tables and plots in the terminal, pictures. `records` reads run folders without torch."""
