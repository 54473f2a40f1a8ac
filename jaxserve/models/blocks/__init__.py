"""The decoder's block kinds as flax.nnx modules, one file each: its arrays with their checkpoint names, and its forward pass.

A module is made of its spec and `Declare`, and then holds descriptions (ArrayInfo) where arrays will be; the decoder merges it
with arrays while JAX traces. It computes one shard of a `jax.shard_map` over the mesh axis "tensor": a shard holds some of the
heads, of the MLP's columns and of the vocabulary. Each block ends with the collective that makes its output whole again.
"""
