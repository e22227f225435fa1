"""The pipeline: stages, the boundaries between them, and the training loop."""
