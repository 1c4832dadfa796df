"""The target service: owns the model, verifies drafts, streams tokens. Run it with `python -m target_service`."""
