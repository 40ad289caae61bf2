"""Recipes: an edit kept on disk as data."""
