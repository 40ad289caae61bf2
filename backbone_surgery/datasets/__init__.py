"""Data sets: text and activations for every row of files, shard by shard, once each."""
