"""What tests share: ranks that are started once, a model with exact arithmetic, a reference."""
