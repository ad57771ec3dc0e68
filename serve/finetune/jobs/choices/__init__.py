"""What the request of a job may choose: its settings, losses, and the parameters that learn."""
