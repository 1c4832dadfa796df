"""What drafts: `lookup` copies from the session's own text, `model` asks a small model."""
