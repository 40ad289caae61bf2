"""Meshes: how the weights of a model are laid out over several devices."""
