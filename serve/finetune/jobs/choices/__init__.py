"""The request of a job may choose its settings, its losses, and the parameters that learn."""
