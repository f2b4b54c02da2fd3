"""Results in a browser and in notebooks: figures that zoom and filter, tables, and the one page that holds them all."""
