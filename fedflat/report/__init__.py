"""Results as terminal tables and plots, as figures, and as an HTML report."""
