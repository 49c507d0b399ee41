"""A small training server that speaks the Tinker protocol. See README.md in this folder."""
