"""Analysis: questions asked of a language model, answered by rewrites and few batched passes."""
