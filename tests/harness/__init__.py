"""What tests share: ranks that are spawned once, a model with exact arithmetic, a reference."""
