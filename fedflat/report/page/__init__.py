"""The pieces of the HTML report: what each section says and shows, and the style sheet and scripts of the page."""
