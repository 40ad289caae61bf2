"""Drawing: pictures of models and figures of analyses."""
