"""One HTML page about runs: plots as inline SVG, and every number of a plot in a table below it."""
