"""Serving: many requests, each with an edit of its own, in one compiled batch."""
