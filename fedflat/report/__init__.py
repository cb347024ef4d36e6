"""Showing results: tables and plots in the terminal, pictures, the HTML report. `records` reads folders without torch."""
