"""Response formats: what a new text has to be, as a table that the compiled loop looks up."""
