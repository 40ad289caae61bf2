"""Pass 1, open: the inside of every decoder block becomes part of the layer graph."""
