"""Weights: addressed by path, moved between models, and kept on disk together with an edit."""
