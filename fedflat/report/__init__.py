"""Showing results: terminal tables and plots, pictures, the HTML report. `records` reads run folders without torch."""
