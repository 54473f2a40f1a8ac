"""LoRA adapters: their files, and what they add to a model."""
