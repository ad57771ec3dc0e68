"""The AMP training loop alone: it needs torch, and nothing of a job."""
