"""Generation: a compiled, cached loop over a rewired backbone. Needs the JAX backend of Keras."""
