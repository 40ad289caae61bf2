"""Planning: what a model takes on chips that are there or not."""
